-- Before, a gemm step without beta added nothing of its c; from then on it adds c once. Programs on record that name none
-- keep their meaning, whether they wait, run again or have results that are to be computed again.
UPDATE jobs SET request = json_set(request, '$.steps', json((
    SELECT json_group_array(json(
        CASE
            WHEN json_extract(value, '$.op') = 'gemm' AND json_extract(value, '$.c') IS NOT NULL
                AND json_extract(value, '$.beta') IS NULL
            THEN json_set(value, '$.beta', 0)
            ELSE value
        END
    )) FROM (SELECT value FROM json_each(request, '$.steps') ORDER BY key)
)))
WHERE op = 'program' AND instr(request, '"c":') > 0;
