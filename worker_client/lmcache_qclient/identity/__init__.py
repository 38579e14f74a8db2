"""Digests of what makes equal token ids mean different tensors; the capture and the SDK compute them alike."""
