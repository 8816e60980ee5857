-- The SHA-256 of an array's .npy file, which downloads carry as Repr-Digest; NULL until known.
ALTER TABLE arrays ADD COLUMN npy_sha256 TEXT;
