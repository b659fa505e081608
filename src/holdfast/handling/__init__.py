"""How one handler is run: on the loop, in a thread, or in a transaction."""
