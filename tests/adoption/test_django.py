"""The application for Django: its pages of the admin, its command and its test cases, in the project of its page."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from chaos.releases import NextRelease, make_next
from holdfast.errors import ConfigurationError
from holdfast.postgres import migrate
from holdfast.postgres.addresses import django_address
from tests.adoption.test_frameworks import FOLDER, saved

# Tests of a project, which Django's own runner runs.
TESTS = """
from io import StringIO
from unittest import mock

from django.contrib.auth.models import Permission, User
from django.core.management import CommandError, call_command
from django.db import connection, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.test import TestCase
from holdfast import EventEnvelope, HandlerRegistry, Publisher, Reject, Retry
from holdfast.errors import ConfigurationError
from holdfast.testing.django import HoldfastTestCase, OutboxMixin
from orders.models import Order

registry = HandlerRegistry()
publisher = Publisher("shop")
LIST = "/admin/holdfast/faileddelivery/"


@registry.handler("order.placed", name="mail.confirm")
def confirm(event: EventEnvelope) -> None:
    raise LookupError("no <address>")


class AdminTests(HoldfastTestCase):
    registry = registry

    def setUp(self) -> None:
        for number in (1, 2, 3):
            self.outbox.publish("order.placed", {"order_id": number, "secret": "s3cret"})
        self.outbox.drain()
        self.rows = [str(row["id"]) for row in self.outbox.fetch("SELECT id FROM core.outbox WHERE status = 'failed'")]

    def login(self, *names: str) -> None:
        user = User.objects.create_user("ada", is_staff=True)
        found = Permission.objects.filter(codename__in=[f"{name}_faileddelivery" for name in names])
        self.assertEqual(len(found), len(names))
        user.user_permissions.set(found)
        self.client.force_login(user)

    def states(self):
        return sorted(row[0] for row in self.outbox.fetch(
            "SELECT CASE WHEN deleted_at IS NULL THEN status ELSE 'discarded' END FROM core.outbox"))

    def audit(self):
        return [tuple(row) for row in self.outbox.fetch("SELECT actor, action, reason FROM core.audit")]

    def test_groups_deliveries_and_one_with_its_traceback(self) -> None:
        self.login("view")
        page = self.client.get(LIST).content.decode()
        self.assertIn("?group=mail.confirm/LookupError", page)
        self.assertIn("no &lt;address&gt;", page)
        for row in self.rows:
            self.assertIn(row, page)
        self.assertNotIn('value="replay"', page)
        detail = self.client.get(f"{LIST}{self.rows[0]}/").content.decode()
        self.assertIn("raise LookupError", detail)
        self.assertNotIn("s3cret", detail)

    def test_payloads_are_for_those_who_may_read_them(self) -> None:
        self.login("view", "read_payload")
        self.assertIn("s3cret", self.client.get(f"{LIST}{self.rows[0]}/").content.decode())

    def test_a_delivery_is_replayed_and_the_audit_has_the_user(self) -> None:
        self.login("view", "replay")
        page = self.client.get(LIST).content.decode()
        self.assertIn('value="replay"', page)
        self.assertNotIn('value="discard"', page)
        asked = {"verb": "replay", "id": self.rows[:2], "reason": "mail is back"}
        page = self.client.post(f"{LIST}move/", asked, follow=True).content.decode()
        self.assertIn("2 replayed.", page)
        self.assertEqual(self.states(), ["failed", "pending", "pending"])
        self.assertEqual(self.audit(), [("ada", "replay", "mail is back")])

    def test_a_group_is_discarded(self) -> None:
        self.login("view", "discard")
        names = self.outbox.fetch("SELECT handler_name || '/' || error_signature FROM core.outbox")
        [group] = {row[0] for row in names}
        self.assertIn(f"All of {group}", self.client.get(LIST, {"group": group}).content.decode())
        page = self.client.post(f"{LIST}move/", {"verb": "discard", "group": group}, follow=True).content.decode()
        self.assertIn("3 discarded.", page)
        self.assertEqual(self.audit(), [("ada", "discard", None)])
        self.assertIn("No delivery has failed", page)

    def test_what_is_not_allowed_is_refused(self) -> None:
        self.assertEqual(self.client.get(LIST).status_code, 302)  # to the login
        self.login("view", "replay")
        for verb in ("discard", "purge", ""):
            answer = self.client.post(f"{LIST}move/", {"verb": verb, "id": self.rows})
            self.assertEqual(answer.status_code, 403)
        self.assertEqual(self.client.get(f"{LIST}move/").status_code, 405)
        User.objects.get().user_permissions.clear()
        self.assertEqual(self.client.get(LIST).status_code, 403)
        self.assertEqual(self.client.get(f"{LIST}{self.rows[0]}/").status_code, 403)
        self.assertEqual(self.client.post(f"{LIST}move/", {"verb": "replay", "id": self.rows}).status_code, 403)
        self.assertEqual((self.states(), self.audit()), (["failed"] * 3, []))

    def test_mistakes_are_told(self) -> None:
        self.login("view", "replay")
        page = self.client.post(f"{LIST}move/", {"verb": "replay"}, follow=True).content.decode()
        self.assertIn("Nothing was chosen: tick the deliveries to replay.", page)
        self.assertEqual(self.client.get(f"{LIST}00000000-0000-7000-8000-000000000000/").status_code, 404)
        self.assertEqual(self.client.get(LIST, {"before": "never"}).status_code, 404)

    def test_the_command_has_the_database_of_the_project(self) -> None:
        out = StringIO()
        call_command("holdfast", "failed", "groups", stdout=out)
        self.assertIn("mail.confirm", out.getvalue())
        out = StringIO()
        call_command("holdfast", "failed", "list", "--json", stdout=out)
        for row in self.rows:
            self.assertIn(row, out.getvalue())
        errors = StringIO()
        with self.assertRaisesMessage(CommandError, "frobnicate"):
            call_command("holdfast", "frobnicate", stderr=errors)
        self.assertIn("Try 'python manage.py holdfast -h'", errors.getvalue())

    def test_what_has_not_failed_is_not_shown(self) -> None:
        self.login("view", "read_payload")
        self.outbox.publish("order.billed", {"secret": "s3cret"})
        [other] = self.outbox.fetch("SELECT id FROM core.outbox WHERE event_type = 'order.billed'")
        self.assertEqual(self.client.get(f"{LIST}{other['id']}/").status_code, 404)
        self.client.logout()
        User.objects.all().delete()
        self.login("view", "replay")
        self.client.post(f"{LIST}move/", {"verb": "replay", "id": self.rows})
        self.assertEqual(self.client.get(f"{LIST}{self.rows[0]}/").status_code, 200)  # it has failed before

    def test_a_database_that_is_away_is_told(self) -> None:
        self.login("view")
        with self.settings(HOLDFAST={"SCHEMA": "elsewhere"}):
            page = self.client.get(f"{LIST}{self.rows[0]}/", follow=True).content.decode()
        self.assertIn("elsewhere", page)

    def test_a_database_of_no_runner_is_refused(self) -> None:
        with mock.patch.dict(connection.settings_dict, NAME="shop"):
            with self.assertRaisesMessage(ConfigurationError, "not the name of a database for tests"):
                self._database()


class TransactionTests(OutboxMixin, TestCase):
    registry = HandlerRegistry()

    def test_handlers_follow_each_other_in_the_transaction(self) -> None:
        registry = HandlerRegistry()

        @registry.handler("order.placed", name="orders.store")
        def store(event, tx: BaseDatabaseWrapper):
            Order.objects.create(pk=event.payload["n"])
            publisher.publish(tx, "order.stored", {"n": event.payload["n"]})

        @registry.handler("order.stored", name="mail.refuse")
        def refuse(event):
            return Reject("no address")

        @registry.handler("order.*", name="mail.later")
        def later(event, tx: BaseDatabaseWrapper):
            Order.objects.create(pk=99)
            return Retry()

        publisher.publish(connection, "order.placed", {"n": 1}, delay=3600)
        publisher.publish(connection, "order.placed", {"n": 5}, target="billing")
        done = self.outbox.drain(registry)
        self.assertEqual((done.delivered, done.retried, done.failed), (1, 2, 1))
        self.outbox.assert_handled("orders.store", {"n": 1}, times=1)
        self.outbox.assert_failed("mail.refuse", reason="rejected")
        self.assertEqual([order.pk for order in Order.objects.all()], [1])  # a retry takes back what it wrote
        self.assertEqual(self.outbox.drain(registry).retried, 2)

    def test_a_handler_without_tx_is_in_the_transaction_too(self) -> None:
        registry = HandlerRegistry()

        @registry.handler("order.placed", name="orders.store")
        def store(event):
            Order.objects.create(pk=Order.objects.get().pk + 1)

        Order.objects.create(pk=7)
        publisher.publish(connection, "order.placed", {})
        self.assertEqual(self.outbox.drain(registry).delivered, 1)
        self.assertEqual([order.pk for order in Order.objects.all()], [7, 8])

    def test_a_handler_that_goes_on_after_a_failed_statement_has_not_delivered(self) -> None:
        registry = HandlerRegistry()

        @registry.handler("order.placed", name="orders.store")
        def store(event, tx: BaseDatabaseWrapper):
            try:
                with transaction.atomic(savepoint=False):
                    raise LookupError
            except LookupError:
                pass

        publisher.publish(connection, "order.placed", {})
        with self.assertRaises(transaction.TransactionManagementError):
            self.outbox.drain(registry)
        self.outbox.assert_published("order.placed", times=1)

    def test_dumpdata_finds_no_table_missing(self) -> None:
        for options in ({}, {"use_base_manager": True}):
            out = StringIO()
            call_command("dumpdata", "holdfast", stdout=out, **options)
            self.assertEqual(out.getvalue().strip(), "[]")

    def test_an_error_of_a_handler_is_raised_and_the_transaction_goes_on(self) -> None:
        publisher.publish(connection, "order.placed", {})
        with self.assertRaisesMessage(LookupError, "no <address>"):
            self.outbox.drain(registry)
        self.outbox.assert_published("order.placed", times=1)

    def test_what_it_cannot_do_is_refused(self) -> None:
        registry = HandlerRegistry()

        @registry.handler("order.placed", name="orders.store")
        async def store(event, tx): ...

        publisher.publish(connection, "order.placed", {})
        with self.assertRaisesMessage(ConfigurationError, "HoldfastTestCase"):
            self.outbox.drain(registry)
        with self.assertRaisesMessage(ConfigurationError, "registry"):
            type(self.outbox)(None, "default", "core").drain()

    def test_nothing_is_left_of_other_tests(self) -> None:
        self.assertEqual(self.outbox.published(), [])
"""

# Tests of a project whose errors have long words, in a browser.
WIDE = """
import os
import shutil

from django.contrib.auth.models import User
from django.contrib.staticfiles.testing import StaticLiveServerTestCase
from holdfast import EventEnvelope, HandlerRegistry
from holdfast.testing.django import HoldfastTestCase
from playwright.sync_api import sync_playwright

registry = HandlerRegistry()
os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "1"  # Playwright keeps an event loop running in the thread of the test


@registry.handler("order.placed", name="mail.confirm")
def confirm(event: EventEnvelope) -> None:
    raise LookupError("no address in " + 300 * "w")


class WidthTests(HoldfastTestCase, StaticLiveServerTestCase):
    registry = registry

    def test_no_page_is_wider_than_the_window(self) -> None:
        self.outbox.publish("order.placed", {})
        self.outbox.drain()
        self.client.force_login(User.objects.create_superuser("ada"))
        cookie = {"name": "sessionid", "value": self.client.cookies["sessionid"].value, "url": self.live_server_url}
        program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
            for width in (1280, 390):
                context = browser.new_context(viewport={"width": width, "height": 844})
                context.add_cookies([cookie])
                page = context.new_page()
                page.goto(f"{self.live_server_url}/admin/holdfast/faileddelivery/")
                self.require_width(page, width)
                page.click("text=mail.confirm >> nth=-1")
                page.wait_for_selector("text=Traceback")
                self.require_width(page, width)
            browser.close()

    def require_width(self, page, width: int) -> None:
        self.assertIn("no address", page.inner_text("#content-main"))
        self.assertEqual(page.evaluate("document.documentElement.scrollWidth"), width)
"""

# A migration of a project, which needs the schema of the installed release.
PUBLISHING = """
from django.db import migrations
from holdfast import Publisher


def publish(apps, schema_editor):
    Publisher("shop").publish(schema_editor.connection, "order.placed", {})


class Migration(migrations.Migration):
    dependencies = [("orders", "0001_initial"), ("holdfast", "0001_initial")]
    operations = [migrations.RunPython(publish)]
"""


# A program of a project whose outbox is not in Django's default database.
DRAINED = """
import asyncio

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from holdfast import HandlerRegistry, Publisher, Worker
from holdfast.integrations.django.configuration import Configuration

registry = HandlerRegistry()


@registry.handler("order.placed", name="mail.confirm")
def confirm(event, tx: BaseDatabaseWrapper) -> None:
    print("delivered to", tx.alias)


with transaction.atomic(using="events"):
    Publisher("shop").publish(connections["events"], "order.placed", {})
asyncio.run(Worker(Configuration.read().dsn, registry).drain())
"""


@pytest.mark.nightly("project with the testing kit")
async def test_the_tests_of_a_project(empty_dsn: str, tmp_path: Path) -> None:
    """The admin shows and moves dead letters for those who may, and the audit names them.

    With an address in the settings, tests still use the database of the test runner (OPS-4).
    """
    saved(FOLDER / "django.md", tmp_path)
    with (tmp_path / "settings.py").open("a") as settings:
        settings.write('HOLDFAST = {"DSN": os.environ["HOLDFAST_DSN"]}')
    (tmp_path / "orders" / "tests.py").write_text(TESTS)
    manage(tmp_path, empty_dsn, "makemigrations", "orders")
    manage(tmp_path, empty_dsn, "test", "orders.tests")
    assert not (await migrate.state(empty_dsn)).applied


@pytest.mark.slow
def test_the_admin_fits_the_window(empty_dsn: str, tmp_path: Path) -> None:
    """An error of one long word does not push what stands beside it out of the page (OPS-2)."""
    saved(FOLDER / "django.md", tmp_path)
    (tmp_path / "orders" / "tests.py").write_text(WIDE)
    manage(tmp_path, empty_dsn, "makemigrations", "orders")
    manage(tmp_path, empty_dsn, "test", "orders.tests")


@pytest.mark.slow
async def test_a_later_release_comes_before_the_migrations_of_the_project(empty_dsn: str, tmp_path: Path) -> None:
    """A migration that publishes finds the schema of the installed release; with --fake nothing is changed (ENV-3)."""
    saved(FOLDER / "django.md", tmp_path)
    manage(tmp_path, empty_dsn, "makemigrations", "orders")
    (tmp_path / "orders" / "migrations" / "0002_publish.py").write_text(PUBLISHING)
    await migrate.apply(empty_dsn)
    (tmp_path / "next").mkdir()
    following = make_next(tmp_path / "next")

    async def pending() -> list[str]:
        return [each.name for each in (await migrate.state(empty_dsn, source=following.sql)).pending]

    manage(tmp_path, empty_dsn, "migrate", "--fake", "holdfast", release=following)
    manage(tmp_path, empty_dsn, "migrate", "--fake", "orders", "0001", release=following)
    assert await pending() == ["next"]
    manage(tmp_path, empty_dsn, "migrate", "orders", release=following)
    assert await pending() == []


def test_a_database_that_no_address_can_name_is_refused() -> None:
    place = {"NAME": "shop", "USER": "ada", "PASSWORD": "", "HOST": "db", "PORT": 5432}
    for entry, problem in (
        ({"OPTIONS": {"service": "shop"}}, "has service in its OPTIONS"),
        ({"OPTIONS": {"assume_role": "shop"}}, "has assume_role in its OPTIONS"),
        ({"NAME": ""}, "has no NAME"),
    ):
        with pytest.raises(ConfigurationError, match=f"{problem}.*HOLDFAST = .*DSN"):
            django_address({**place, **entry})
    options = {"options": "-c work_mem=5MB", "sslmode": "disable"}
    assert django_address({**place, "OPTIONS": options}) == (
        "postgresql://ada@db:5432/shop?sslmode=disable&options=-c%20work_mem%3D5MB"
    )


@pytest.mark.slow
def test_a_setting_that_cannot_be_used_fails_the_checks(empty_dsn: str, tmp_path: Path) -> None:
    """`manage.py check` names it, and so does `migrate`, without a traceback."""
    saved(FOLDER / "django.md", tmp_path)
    settings = (tmp_path / "settings.py").read_text()
    middleware = 'MIDDLEWARE.append("holdfast.integrations.django.IdempotencyMiddleware")\nHOLDFAST_IDEMPOTENCY = '
    for wrong, problem, code in (
        ('HOLDFAST = {"USIGN": "default"}', "USIGN is unknown; use DSN, SCHEMA, USING", "holdfast.E001"),
        ('HOLDFAST = "default"', "HOLDFAST is str, not dict; write HOLDFAST = {", "holdfast.E001"),
        (f'{middleware}{{"SECRETS": {{1: "short"}}}}', "secrets number 1 is too short", "holdfast.E002"),
        (f'{middleware}{{**SECRETS, "KEEEP": 5}}', "HOLDFAST_IDEMPOTENCY: KEEEP is unknown", "holdfast.E002"),
        (
            f'{middleware}{{**SECRETS, "USING": "events"}}',
            "USING is 'events', which is not in DATABASES",
            "holdfast.E002",
        ),
        (f'{middleware}{{**SECRETS, "SCOPE": "no.where"}}', "SCOPE is 'no.where', and No module", "holdfast.E002"),
    ):
        (tmp_path / "settings.py").write_text(f"{settings}\nSECRETS = {{'SECRETS': {{1: 20 * 's'}}}}\n{wrong}\n")
        for command in ("check", "migrate") if "USIGN" in wrong else ("check",):
            with pytest.raises(AssertionError, match=problem) as refused:
                manage(tmp_path, empty_dsn, command)
            assert code in str(refused.value) and "Traceback" not in str(refused.value)


@pytest.mark.slow
def test_remedies_name_the_place_of_the_address(empty_dsn: str, tmp_path: Path) -> None:
    """A project has the address in its settings, and no variable of Holdfast's (S20)."""
    saved(FOLDER / "django.md", tmp_path)
    settings = (tmp_path / "settings.py").read_text()
    for more, place in (("", 'DATABASES["default"]'), ('HOLDFAST = {"DSN": _place.geturl()}', 'HOLDFAST["DSN"]')):
        (tmp_path / "settings.py").write_text(f"{settings}\n{more}\n")
        with pytest.raises(AssertionError) as refused:
            manage(tmp_path, empty_dsn, "holdfast", "status")
        assert f"try: check the database in {place} and" in " ".join(str(refused.value).split())


@pytest.mark.slow
def test_handlers_write_to_the_database_with_the_outbox(empty_dsn: str, tmp_path: Path) -> None:
    """With `USING`, a worker need not be told which connection handlers write to (LSN-13)."""
    saved(FOLDER / "django.md", tmp_path)
    shop = urlsplit(empty_dsn).path.lstrip("/")
    with (tmp_path / "settings.py").open("a") as settings:  # Django's default is a database without an outbox
        settings.write(
            f'DATABASES["events"] = {{**DATABASES["default"], "NAME": "{shop}"}}\n'
            'DATABASES["default"] = {**DATABASES["default"], "NAME": "postgres"}\n'
            'HOLDFAST = {"USING": "events"}\n'
        )
    (tmp_path / "orders" / "drained.py").write_text(DRAINED)
    manage(tmp_path, empty_dsn, "makemigrations", "orders")
    manage(tmp_path, empty_dsn, "migrate", "--database", "events")
    assert "delivered to events\n" in manage(tmp_path, empty_dsn, "shell", "-c", "import orders.drained")


@pytest.mark.slow
def test_the_migration_is_nothing_backwards(empty_dsn: str, tmp_path: Path) -> None:
    """Events outlive a migration that is taken back, and `migrate` finds the schema as it is (ENV-3)."""
    saved(FOLDER / "django.md", tmp_path)
    manage(tmp_path, empty_dsn, "migrate", "holdfast")
    manage(tmp_path, empty_dsn, "migrate", "holdfast", "zero")
    assert "pending 0" in manage(tmp_path, empty_dsn, "holdfast", "status")
    manage(tmp_path, empty_dsn, "migrate", "holdfast")


def manage(folder: Path, dsn: str, *arguments: str, release: NextRelease | None = None) -> str:
    run = subprocess.run(
        [sys.executable, "manage.py", *arguments],
        cwd=folder,
        env={**os.environ, "HOLDFAST_DSN": dsn, **(release.environment if release else {})},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout
