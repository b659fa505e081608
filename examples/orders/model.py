"""An order, and what follows it. What happens to it is recorded on it; that it is published is not its concern."""

from __future__ import annotations

from datetime import date, datetime
from uuid import UUID, uuid4

from sqlalchemy import DateTime, FetchedValue
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from holdfast import NewEvent
from holdfast.domain_events import RecordsEvents


class Base(DeclarativeBase):
    pass


class Order(RecordsEvents, Base):
    __tablename__ = "orders"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    customer: Mapped[str]
    total_cents: Mapped[int]
    placed_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=FetchedValue())

    @classmethod
    def place(cls, customer: str, total_cents: int) -> Order:
        order = cls(id=uuid4(), customer=customer, total_cents=total_cents)
        placed = {"order_id": str(order.id), "customer": customer, "total_cents": total_cents}
        order.record(NewEvent("order.placed", placed, domain_id=order.id))
        return order


class Sale(Base):
    """A line of the ledger."""

    __tablename__ = "ledger"

    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[UUID]
    total_cents: Mapped[int]
    recorded_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=FetchedValue())


class DayOfOrders(Base):
    """A figure for the shop's window."""

    __tablename__ = "orders_by_day"

    day: Mapped[date] = mapped_column(primary_key=True)
    orders: Mapped[int]


class ClosedDay(Base):
    """The books of a day that has ended."""

    __tablename__ = "closed_days"

    day: Mapped[date] = mapped_column(primary_key=True)
    orders: Mapped[int]
    total_cents: Mapped[int]
