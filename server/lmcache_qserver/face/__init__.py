"""What people and their tools see of the server: HTTP, metrics, logs, the service manager."""
