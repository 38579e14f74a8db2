"""The server's side of the wire: the ROUTER socket with its clients, and the lifeline beside it."""
