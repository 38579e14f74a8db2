"""The connector for stock vLLM. Importing this package imports no vLLM; `connector` does."""
