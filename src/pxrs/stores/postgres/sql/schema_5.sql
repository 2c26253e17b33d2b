-- For how long nothing is forgotten of what a session did: until its row here goes.
CREATE TABLE @.pxrs_ended_sessions (
    session text COLLATE "C" PRIMARY KEY, at timestamptz NOT NULL);
