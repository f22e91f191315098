"""Models, Plan, Monitor, Server, Bench and the application around them, driven by keys."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import msgspec
import pytest
from textual.widgets import Button, DataTable, Input

from edgellm.errors import EngineError, StoreError
from edgellm.planner.plan import Alternative, Plan, PlanRequest
from edgellm.tui.app import SEVERITY, EdgeApp
from edgellm.tui.demo import RUNS, DemoServices
from edgellm.tui.ledger import LedgerBar
from edgellm.tui.ports import Preferences, Progress
from edgellm.tui.widgets import Metric, Stepper
from tests.tui.driving import settle, stepped

SIZE = (120, 36)


@pytest.fixture
def app(services: DemoServices) -> EdgeApp:
    """Somebody was here before: it opens on Models."""
    app = EdgeApp(services)
    app.store.save_setting("welcomed", "yes")
    return app


async def open_models(pilot: Any, app: EdgeApp) -> Any:
    if app.current_mode == "welcome":
        await settle(pilot, lambda: getattr(app.screen, "suggestions", None))
        await pilot.press("escape")
    await settle(pilot, lambda: len(getattr(app.screen, "_verdicts", ())) >= 3)
    return app.screen


def names(app: EdgeApp) -> list[str]:
    table: DataTable[Any] = app.screen.query_one(DataTable)
    return [str(table.get_cell(key, "Model")) for key in table.rows]


async def test_models_filter_as_you_type_and_the_hub_is_asked_on_enter(tmp_path: Any) -> None:
    app = EdgeApp(DemoServices(str(tmp_path), models=3))
    async with app.run_test(size=SIZE) as pilot:
        await open_models(pilot, app)
        await settle(pilot, lambda: len(names(app)) == 6)
        await pilot.press("slash", *"qwen")
        await settle(pilot, lambda: len(names(app)) == 2)
        assert all("Qwen" in name for name in names(app))
        await pilot.press("enter")
        await settle(pilot, lambda: app.screen._rows["hub"])
        assert {row.source for row in app.screen._rows["hub"]} == {"hub"}


async def test_the_arrows_on_a_table_without_rows_do_nothing(app: EdgeApp) -> None:
    async with app.run_test(size=SIZE) as pilot:
        screen = await open_models(pilot, app)
        screen.query_one("#filter", Input).value = "no model is called so"
        await settle(pilot, lambda: screen.query_one(DataTable).row_count == 0)
        await pilot.press("down", "up", "d", "p", "x", "enter")
        assert app.current_mode == "models"
        assert screen.current is None


async def test_a_verdict_says_whole_partial_or_too_big(app: EdgeApp) -> None:
    async with app.run_test(size=SIZE) as pilot:
        await open_models(pilot, app)
        await settle(pilot, lambda: len(app.screen._verdicts) == 6)
        table: DataTable[Any] = app.screen.query_one(DataTable)
        verdicts = [str(table.get_cell(key, "Here")) for key in table.rows]
        assert verdicts == ["● GPU", "● GPU", "◐ 29/33", "◐ 25/49", "◐ 13/49", "✗ too big"]


async def test_a_download_pauses_resumes_and_finishes_beside_another(tmp_path: Any) -> None:
    services = DemoServices(str(tmp_path), models=3)
    gate = threading.Event()
    done: dict[str, int] = {}

    def pull(ref: str, on_progress: Any, stopped: Any) -> str:
        while done.setdefault(ref, 0) < 10:
            if stopped():
                raise StoreError("stopped")
            if done[ref] >= 5 and not gate.wait(0.01):
                continue
            done[ref] += 1
            on_progress(Progress(phase="downloading", n_done=done[ref], n_total=10, rate=1.0))
        return "/models/x.gguf"

    services.pull = pull  # type: ignore[method-assign]
    app = EdgeApp(services)
    async with app.run_test(size=SIZE) as pilot:
        await open_models(pilot, app)
        await settle(pilot, lambda: len(names(app)) == 6)
        await pilot.press(*["down"] * 3, "d", "down", "d")
        await settle(pilot, lambda: list(done.values()) == [5, 5])
        first, second = app.downloads.items.values()
        await pilot.press("p")
        await settle(pilot, lambda: second.state == "paused")
        assert first.state == "running"
        await pilot.press("p")
        await settle(pilot, lambda: len(app.downloads.items) == 2)
        gate.set()
        states = lambda: [d.state for d in app.downloads.items.values()]  # noqa: E731
        await settle(pilot, lambda: states() == ["done", "done"])


async def test_a_failed_download_is_said_with_the_next_step(tmp_path: Any) -> None:
    services = DemoServices(str(tmp_path), models=3)

    def pull(ref: str, on_progress: Any, stopped: Any) -> str:
        raise StoreError("the hub is away", hint="try again later")

    services.pull = pull  # type: ignore[method-assign]
    app = EdgeApp(services)
    async with app.run_test(size=SIZE) as pilot:
        await open_models(pilot, app)
        await settle(pilot, lambda: len(names(app)) == 6)
        await pilot.press(*["down"] * 3, "d")
        await settle(pilot, lambda: app._notifications)
        shown = [n.message for n in app._notifications]
        assert any("the hub is away\n→ try again later" in message for message in shown)


async def open_plan(pilot: Any, app: EdgeApp) -> Any:
    await open_models(pilot, app)
    await pilot.press("down", "down", "enter")
    await settle(pilot, lambda: getattr(app.screen, "plan", None) is not None)
    await settle(pilot, lambda: isinstance(app.focused, Stepper))
    return app.screen


async def test_each_step_is_planned_again_and_says_what_it_costs(app: EdgeApp) -> None:
    async with app.run_test(size=SIZE) as pilot:
        screen = await open_plan(pilot, app)
        await settle(pilot, lambda: screen.plan.alternatives)
        before = screen.plan
        await pilot.press("left")
        await settle(pilot, lambda: screen.plan is not before)
        assert screen.plan.params.n_gpu_layers == before.params.n_gpu_layers - 1
        change = str(screen.query_one("#change").render())
        assert "CUDA0 −" in change
        assert "tok/s" in change
        await pilot.press("a")
        await settle(pilot, lambda: screen.plan.params == before.params)


async def test_the_bars_hold_the_plan_s_own_bytes(app: EdgeApp) -> None:
    async with app.run_test(size=SIZE) as pilot:
        screen = await open_plan(pilot, app)
        await settle(pilot, lambda: len(screen.query(LedgerBar)) == 2)
        bar = screen.query(LedgerBar).first().bar
        shares = {share.field: share.n_bytes for share in bar.shares}
        device = screen.plan.devices[0]
        assert shares["weights"] == device.weights
        assert shares["kv_cache"] == device.kv_cache
        assert sum(shares.values()) == device.total


async def test_an_alternative_is_one_key_and_moves_its_stepper(app: EdgeApp) -> None:
    async with app.run_test(size=SIZE) as pilot:
        screen = await open_plan(pilot, app)
        await settle(pilot, lambda: screen.plan.alternatives)
        await pilot.press("y")
        await settle(pilot, lambda: screen.plan.params.type_k == "q8_0")
        assert screen.query_one("#step-type-k", Stepper).value == "q8_0"


async def test_the_alternatives_shown_are_those_of_the_last_step(
    app: EdgeApp, services: DemoServices
) -> None:
    asked: list[PlanRequest] = []
    find = services.alternatives

    def counting(ref: str, request: PlanRequest, plan: Plan) -> Plan:
        asked.append(request)
        return find(ref, request, plan)

    services.alternatives = counting  # type: ignore[method-assign]
    async with app.run_test(size=SIZE) as pilot:
        screen = await open_plan(pilot, app)
        await pilot.press(*["left"] * 5)
        wanted = screen.query(Stepper).first().value
        await settle(pilot, lambda: screen.plan.params.n_gpu_layers == wanted)
        await settle(pilot, lambda: screen.plan.alternatives)
        assert asked[-1] == screen.asked
        assert screen.plan.params == services.plan(app.chosen.ref, screen.asked).params  # type: ignore[union-attr]


async def test_another_model_is_planned_though_nothing_else_was_asked(app: EdgeApp) -> None:
    async with app.run_test(size=SIZE) as pilot:
        screen = await open_plan(pilot, app)
        before = screen.plan.model.name
        await pilot.press("1")
        await settle(pilot, lambda: app.current_mode == "models")
        await pilot.press("up", "enter")
        await settle(pilot, lambda: screen.plan is not None and screen.plan.model.name != before)


async def test_a_smaller_quantisation_is_looked_for_among_the_models(
    app: EdgeApp, services: DemoServices
) -> None:
    other = Alternative(title="Q3_K_M", change={"quant": "Q3_K_M"}, gain="whole", cost="rounder")

    def smaller(ref: str, request: PlanRequest, plan: Plan) -> Plan:
        return msgspec.structs.replace(plan, alternatives=(other,))

    services.alternatives = smaller  # type: ignore[method-assign]
    async with app.run_test(size=SIZE) as pilot:
        screen = await open_plan(pilot, app)
        await settle(pilot, lambda: screen.plan.alternatives)
        await pilot.press("x")
        await settle(pilot, lambda: app.current_mode == "models" and app.screen._rows["hub"])
        assert app.screen.query_text == screen.plan.model.name


async def test_what_does_not_fit_is_drawn_and_not_loaded(app: EdgeApp) -> None:
    async with app.run_test(size=SIZE) as pilot:
        screen = await open_plan(pilot, app)
        await settle(pilot, lambda: screen.plan.alternatives)
        for _ in range(4):
            await stepped(pilot, screen.query(Stepper).first(), "right")
        assert screen.plan.devices[0].headroom < 0
        assert "✗ does not fit with " in str(screen.query_one("#head").render())
        assert "CUDA0 is over by 579 MiB" in str(screen.query_one("#change").render())
        await pilot.press("enter")
        await settle(pilot, lambda: app._notifications)
        assert app.endpoint is None
        assert any("fewer layers" in n.message for n in app._notifications)


async def test_a_loaded_plan_stands_beside_what_was_measured(app: EdgeApp) -> None:
    async with app.run_test(size=(160, 48)) as pilot:
        screen = await open_plan(pilot, app)
        await pilot.press("enter")
        await settle(pilot, lambda: app.endpoint is not None)
        await pilot.press("f2")
        await settle(pilot, lambda: app.screen is screen)
        assert screen._report(screen.plan) is app.endpoint.report  # type: ignore[union-attr]


async def test_a_plan_is_saved_as_a_profile(app: EdgeApp, services: DemoServices) -> None:
    async with app.run_test(size=SIZE) as pilot:
        screen = await open_plan(pilot, app)
        await pilot.press("ctrl+s")
        await settle(pilot, lambda: app.screen is not screen)
        await pilot.press(*"laptop", "enter")
        await settle(pilot, lambda: services.profiles)
        assert services.profiles["laptop"] == screen.plan


async def test_the_newest_line_of_a_servers_log_is_seen_however_long_the_lines_are(
    app: EdgeApp,
) -> None:
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("5")
        await settle(pilot, lambda: app.focused is not None and app.focused.id == "start")
        await pilot.press("enter")
        screen: Any = app.screen
        await settle(pilot, lambda: screen.handle is not None)
        screen.handle._lines = [f"{i} " + "long " * 200 for i in range(99)]
        screen._show_log()
        log = screen.query_one("#log")
        await settle(pilot, lambda: log.render_line(log.size.height - 1).text.startswith("98 "))


async def test_the_plot_of_nothing_begins_at_zero(app: EdgeApp) -> None:
    async with app.run_test(size=(140, 40)) as pilot:
        app.open_model("starter")
        await settle(pilot, lambda: app.endpoint is not None)
        await pilot.press("f4")
        await settle(pilot, lambda: len(getattr(app.screen, "_plots", ())) == 2)
        screen: Any = app.screen
        metric = screen.query_one("#metric-decode", Metric)
        metric._data.clear()
        metric.push(0.0, "0.0")
        metric.push(0.0, "0.0")
        screen._draw()
        assert "-0." not in screen._plots["throughput"].build()


async def test_a_running_request_is_cancelled_from_the_monitor(app: EdgeApp) -> None:
    async with app.run_test(size=SIZE) as pilot:
        app.open_model("starter")
        await settle(pilot, lambda: app.endpoint is not None)
        await pilot.press("f4")
        await settle(pilot, lambda: getattr(app.screen, "stats", None) is not None)
        await pilot.press("down", "x")
        await settle(pilot, lambda: app.endpoint.cancelled)  # type: ignore[union-attr]
        assert app.endpoint.cancelled == ["req-11c2"]  # type: ignore[union-attr]


async def test_a_lost_server_is_said_once_and_the_monitor_goes_on(
    app: EdgeApp, monkeypatch: Any
) -> None:
    monkeypatch.setattr("edgellm.tui.screens.monitor.TICK_S", 0.05)
    async with app.run_test(size=SIZE) as pilot:
        app.open_model("starter")
        await settle(pilot, lambda: app.endpoint is not None)
        endpoint: Any = app.endpoint
        asked: list[bool] = []

        async def lost() -> Any:
            asked.append(True)
            endpoint.is_alive = False
            raise EngineError("nothing answers at http://127.0.0.1:1", hint="edgellm serve")

        endpoint.stats = lost
        await pilot.press("f4")
        said = lambda: [n for n in app._notifications if "nothing answers" in n.message]  # noqa: E731
        await settle(pilot, lambda: len(asked) > 4)
        assert len(said()) == 1


async def test_a_reading_that_comes_while_the_monitor_is_taken_down_is_dropped(
    app: EdgeApp, services: DemoServices, monkeypatch: Any
) -> None:
    asked, may = threading.Event(), threading.Event()
    read = services.gauge

    def gauge() -> Any:
        asked.set()
        may.wait(10)
        return read()

    monkeypatch.setattr(services, "gauge", gauge)
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("f4")
        await settle(pilot, asked.is_set)
        await app.screen.query(Metric).remove()
        may.set()
        await pilot.pause(0.2)


async def test_serving_starts_shows_its_curl_line_and_stops(app: EdgeApp) -> None:
    async with app.run_test(size=SIZE) as pilot:
        await settle(pilot, lambda: app.current_mode == "models")
        await pilot.press("5")
        await settle(pilot, lambda: isinstance(app.focused, Button))
        screen: Any = app.screen
        screen.query_one("#port", Input).value = "9123"
        await pilot.press("enter")
        await settle(pilot, lambda: screen.handle is not None)
        handle = screen.handle
        assert "curl http://127.0.0.1:9123/v1/chat/completions" in screen.curl()
        await pilot.press("y")
        assert app.clipboard == screen.curl()
        # A button takes no second press while it still shows the first.
        await settle(pilot, lambda: not screen.query_one("#start").has_class("-active"))
        await pilot.press("enter")
        await settle(pilot, lambda: screen.handle is None)
        assert not handle.is_alive


async def test_two_benchmark_runs_are_compared_in_words(
    app: EdgeApp, services: DemoServices
) -> None:
    services.runs = RUNS
    async with app.run_test(size=SIZE) as pilot:
        await settle(pilot, lambda: app.current_mode == "models")
        await pilot.press("6")
        await settle(pilot, lambda: len(getattr(app.screen, "runs", ())) == 5)
        await pilot.press("down", "down", "space", "up", "up")
        from rich.console import Console

        console = Console(width=60)
        with console.capture() as captured:
            console.print(app.screen.query_one("#compare").render()._renderable)
        assert "better" in captured.get()


async def test_the_plot_of_the_runs_is_not_mounted_before_it_has_them(
    app: EdgeApp, services: DemoServices, monkeypatch: pytest.MonkeyPatch
) -> None:
    from textual_plotext import PlotextPlot

    plotted: list[str] = []
    monkeypatch.setattr(PlotextPlot, "on_mount", lambda self: plotted.append(self.plt.build()))
    services.runs = RUNS
    async with app.run_test(size=(160, 48)) as pilot:
        await settle(pilot, lambda: app.current_mode == "models")
        await pilot.press("6")
        await settle(pilot, lambda: plotted)
    assert "101.2" in plotted[0]


async def test_keys_can_be_changed(tmp_path: Any) -> None:
    services = DemoServices(str(tmp_path))
    services.preferred = Preferences(animations=False, keys={"theme": "f9"})
    app = EdgeApp(services)
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("f10")
        assert app.theme == "edgellm-dark"
        await pilot.press("f9")
        assert app.theme == "edgellm-light"
    again = EdgeApp(services)
    assert again.theme == "edgellm-light"


async def test_an_unwritable_disk_is_said_and_the_conversation_stays_in_memory(
    tmp_path: Any,
) -> None:
    (tmp_path / "file").write_text("not a folder")
    app = EdgeApp(DemoServices(str(tmp_path / "file")))
    async with app.run_test(size=SIZE) as pilot:
        await settle(pilot, lambda: app._notifications)
        assert app.store.path == ":memory:"
        assert "in memory only" in next(iter(app._notifications)).message


async def test_a_broken_file_of_conversations_is_kept_and_said(
    services: DemoServices, tmp_path: Any
) -> None:
    path = tmp_path / "chat.db"
    path.write_text("no database, whatever its name says" * 40)
    before = path.read_bytes()
    app = EdgeApp(services)
    async with app.run_test(size=SIZE) as pilot:
        await settle(pilot, lambda: app._notifications)
        assert "move it away" in next(iter(app._notifications)).message
    assert path.read_bytes() == before


async def test_a_model_that_cannot_be_planned_is_a_notification(app: EdgeApp) -> None:
    async with app.run_test(size=SIZE) as pilot:
        app.open_model("no-such-model")
        await settle(pilot, lambda: app._notifications)
        assert any("no model named" in n.message for n in app._notifications)


async def test_the_engine_is_closed_when_the_program_ends(
    app: EdgeApp, services: DemoServices
) -> None:
    async with app.run_test(size=SIZE) as pilot:
        app.open_model("starter")
        await settle(pilot, lambda: app.endpoint is not None)
    await asyncio.sleep(0)
    assert not services.endpoints[0].is_alive


def test_every_error_has_a_notification() -> None:
    from edgellm.errors import DownloadError, EdgeLLMError

    assert SEVERITY[-1][0] is EdgeLLMError
    title = next(title for kind, title, _ in SEVERITY if issubclass(DownloadError, kind))
    assert title == "The network"  # not "Storage": the disk is well
