"""The business table of the benchmarks, as a model of SQLAlchemy."""

from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    """The models of the benchmarks."""


class Order(Base):
    """A row of `orders`."""

    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    note: Mapped[str]
