-- The order in which tools that capabilities name without a server came to theirs; NULL: no capability relies on it.
ALTER TABLE pins ADD COLUMN bound INTEGER;
