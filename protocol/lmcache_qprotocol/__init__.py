"""The wire of lmcache-qserver: messages, codec, key hashing, errors. No I/O, no torch."""
