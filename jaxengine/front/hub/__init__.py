"""Several API processes before one set of engines: the supervisor owns the engines (`hub.py`), the
API processes reach them through it (`remote.py`)."""
