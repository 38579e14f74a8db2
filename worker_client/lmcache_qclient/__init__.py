"""What runs inside a vLLM worker, and the SDK: capture of queries, and reading them back."""
