-- How long each outcome is that is kept for replay, so that all of them together can be bounded without reading them.
ALTER TABLE keys ADD COLUMN bytes INTEGER NOT NULL DEFAULT 0;
UPDATE keys SET bytes = length(CAST(outcome AS BLOB)) WHERE outcome IS NOT NULL;
CREATE INDEX kept_outcomes ON keys (scope, at, bytes) WHERE bytes > 0;
