-- The last record of each chain that a record of another chain names; NULL once that is where a closed chain ends.
ALTER TABLE chains ADD COLUMN named INTEGER DEFAULT 0;
CREATE INDEX chains_unnamed ON chains (chain, settled, named) WHERE named IS NOT NULL;
