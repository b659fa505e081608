"""Brokers: one engine for each of NATS, Redis, RabbitMQ and Kafka, and events in the form of CloudEvents."""
