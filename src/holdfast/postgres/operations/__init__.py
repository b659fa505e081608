"""What operators read and change: one module for each noun, which runs the statements and returns dataclasses.

Each function takes the `Statements` of an open transaction; `status` and `metrics` take a connection. Rows of the
driver do not leave this package.
"""
