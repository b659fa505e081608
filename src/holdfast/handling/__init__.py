"""How one handler is run: on the event loop, in a thread, or in a transaction. Shared by worker and reactions."""
