"""An orders service on Holdfast, with everything it needs: `./dev demo`, or `python -m examples.orders`.

schema.sql     the service's own tables
model.py       an order, and the event that it records when it is placed
api.py         POST /orders stores the order; its event is written in the same transaction
handlers.py    what happens after an order was placed: a confirmation is sent, the sale is recorded, orders are counted
"""
