"""An orders service on Holdfast, with everything it needs: `./dev demo`, or `python -m examples.orders`.

schema.sql     the service's own tables
api.py         POST /orders writes the order and its event in one transaction
handlers.py    what happens after an order was placed: a confirmation is sent, the sale is recorded
"""
