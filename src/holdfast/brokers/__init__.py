"""Events past one database: a relay to a broker, and listeners that take them from there."""
