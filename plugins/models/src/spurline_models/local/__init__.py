"""The local backend: one process, on CPU or one GPU. Start reading at `backend.py`."""
