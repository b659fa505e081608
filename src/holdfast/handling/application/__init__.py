"""Handlers in the application's own transactions: one module for each library."""
