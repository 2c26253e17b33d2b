-- Drops the functions of any older version: their arguments and results may change.
DO $$
DECLARE
    each regprocedure;
BEGIN
    FOR each IN SELECT p.oid FROM pg_proc p JOIN pg_class c ON c.relnamespace = p.pronamespace
            WHERE c.oid = '@.pxrs_queues'::regclass
            AND (starts_with(p.proname, 'pxrs_queue_') OR p.proname = 'pxrs_now_ms') LOOP
        EXECUTE 'DROP FUNCTION ' || each;
    END LOOP;
END $$;
