-- What an operator sees: who owns which partition, and how far it is.
CREATE OR REPLACE VIEW pxrs_partitions AS
    SELECT SUBSTRING_INDEX(SUBSTRING(claim.k, 8), '/', 1) AS `group`, topic.name AS topic,
        CAST(SUBSTRING_INDEX(claim.k, '/', -1) AS UNSIGNED) AS `partition`,
        JSON_VALUE(claim.v, '$.name') AS owner,
        CAST(JSON_VALUE(claim.v, '$.checkpoint') AS SIGNED) AS checkpoint,
        CAST(JSON_VALUE(claim.v, '$.epoch') AS SIGNED) AS epoch,
        CAST(JSON_VALUE(claim.v, '$.at_ms') AS SIGNED) AS heartbeat
    FROM (SELECT CONVERT(name USING utf8mb4) AS k, CONVERT(body USING utf8mb4) AS v
            FROM pxrs_coord WHERE name > 'claims/' AND name < 'claims0') claim
    JOIN (SELECT SUBSTRING(CONVERT(name USING utf8mb4), 8) AS name,
                JSON_VALUE(CONVERT(body USING utf8mb4), '$.id') AS id
            FROM pxrs_coord WHERE name > 'topics/' AND name < 'topics0') topic
        ON topic.id = SUBSTRING_INDEX(SUBSTRING_INDEX(claim.k, '/', -2), '/', 1);
