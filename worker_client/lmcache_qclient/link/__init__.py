"""The client's side of the wire: requests, the lifeline, and the heartbeat that watches both. No torch."""
