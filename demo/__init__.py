"""`make demo`: real queries of a real model, through the whole house, checked against an independent reference."""
