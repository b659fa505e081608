"""Wake-up: how a sleeping worker learns that an event was committed."""
