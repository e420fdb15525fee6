"""The draft-verify step, piece by piece."""
