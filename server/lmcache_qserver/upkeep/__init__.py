"""Looking after a persistent store, with or without a daemon: what `lmcache-qserver l2` does, a file per command.

Stores themselves are in tier/; the command line is l2_cli.py. Everything here works on an open `ChunkStore`, and goes
through it as it is listed: other servers may put and delete meanwhile.
"""
