-- Why a person answered as they did, in their own words.
ALTER TABLE answers ADD COLUMN reason TEXT;
