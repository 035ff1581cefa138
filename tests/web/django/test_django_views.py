"""Limits of single Django views: functions, coroutines, classes, and how each of them is settled."""

from __future__ import annotations

import asyncio
import pickle
from contextlib import nullcontext
from io import BytesIO

import pytest
from django.core.exceptions import PermissionDenied
from django.http import FileResponse, Http404, HttpResponse, StreamingHttpResponse
from django.template.backends.django import DjangoTemplates
from django.template.response import SimpleTemplateResponse
from django.test import Client, RequestFactory
from django.test.utils import override_settings
from django.urls import ResolverMatch, path, re_path
from django.utils.decorators import method_decorator
from django.views import View
from django_asgi import Urls, configure

from limitkeeper import ConfigurationError, MemoryStore
from limitkeeper.policy import Policy
from limitkeeper.web.django import limit
from limitkeeper.web.django.middleware import DjangoRequestContext
from limitkeeper.web.django.settings import site_gates

configure()

ONE = "token bucket 1/min burst 1"
FAILURES = {"limit": "fixed window 9/min", "charge": {"status": ["4xx", "5xx"]}}
BYTES = {"limit": "fixed window 1000/min", "cost": {"response": "1B", "estimate": 1}}


@pytest.fixture(autouse=True)
def own_site(store: MemoryStore):
    """Every test has a site of its own, on a manual clock."""
    with override_settings(LIMITKEEPER={"STORE": store}):
        yield


def get(view, path="/", *args, **headers):
    """The response of a view, awaited where necessary."""
    answer = view(RequestFactory().get(path, headers=headers), *args)
    return asyncio.run(answer) if asyncio.iscoroutine(answer) else answer


def statuses(view, times=2, path="/", **headers):
    return [get(view, path, **headers).status_code for _ in range(times)]


def spent(view):
    """The units spent for a request, its own cost included."""
    answer = get(view)
    return int(answer.headers["X-RateLimit-Limit"]) - int(answer.headers["X-RateLimit-Remaining"])


def test_a_function_is_limited_per_client():
    """A view's own limit counts for each client alone, and for no other view."""

    @limit(ONE)
    def first(request):
        return HttpResponse(str(request.limitkeeper.decision.remaining))

    @limit(ONE)
    def second(request):
        return HttpResponse()

    assert get(first).content == b"0"
    refused = get(first)
    assert refused.status_code == 429
    assert refused.headers["Retry-After"] == "60"
    assert refused.headers["Content-Type"] == "application/json"
    assert first(RequestFactory(REMOTE_ADDR="192.0.2.7").get("/")).status_code == 200
    assert statuses(second) == [200, 429]


def test_a_coroutine_is_limited():
    """An async view stays one, and is limited like a function."""

    @limit(ONE)
    async def view(request):
        return HttpResponse()

    assert asyncio.iscoroutinefunction(view)
    assert statuses(view) == [200, 429]


def test_classes_have_limits_of_their_own():
    """`method_decorator` on dispatch limits a class; two classes that are limited alike do not share."""
    alike = limit(ONE)

    @method_decorator(alike, name="dispatch")
    class First(View):
        def get(self, request):
            return HttpResponse("first")

    @method_decorator(alike, name="dispatch")
    class Second(View):
        async def get(self, request):
            return HttpResponse("second")

    @method_decorator(limit(ONE), name="dispatch")
    class Third(View):
        def get(self, request):
            return HttpResponse("third")

    for view in (First.as_view(), Second.as_view(), Third.as_view()):
        assert statuses(view) == [200, 429]
    assert sorted(name.rpartition(".")[0].rpartition(".")[2] for _, name in site_gates()._gates) == [
        "First",
        "Second",
        "Third",
    ]


def test_several_limits_of_a_class_all_count():
    """A list of limits, and one method_decorator above another: each counts for itself, the tightest decides."""

    @method_decorator(limit("fixed window 100/h"), name="dispatch")
    @method_decorator([limit("fixed window 10/h"), limit("fixed window 2/min")], name="dispatch")
    class Report(View):
        def get(self, request):
            return HttpResponse("report")

    view = Report.as_view()
    answer = get(view)
    assert answer.headers["X-RateLimit-Limit"] == "2"
    assert answer.headers["RateLimit"].count(";r=") == 3
    assert statuses(view) == [200, 429]


def test_single_methods_can_be_limited():
    """A method of a class, decorated where it stands, is limited; the others are not."""

    class Orders(View):
        @method_decorator(limit(ONE))
        def post(self, request):
            return HttpResponse("new")

        def get(self, request):
            return HttpResponse("list")

    view = Orders.as_view()
    assert [view(RequestFactory().post("/")).status_code for _ in range(2)] == [200, 429]
    assert statuses(view) == [200, 200]


def test_a_decorated_class_view_function_is_limited():
    """`limit(…)(Report.as_view())` in a URL configuration has the class's name."""

    class First(View):
        def get(self, request):
            return HttpResponse()

    class Second(First):
        pass

    assert statuses(limit(ONE)(First.as_view())) == [200, 429]
    assert statuses(limit(ONE)(Second.as_view())) == [200, 429]


def test_keys_are_callables_or_identity_names(store):
    """A view's key is a callable given the request, or identities of the site's policy; without a value: the address."""
    policy = Policy.read("identify: {user: {header: X-User}}\nlimits: [{name: a, key: ip, limit: token bucket 1/s burst 99}]")

    @limit(ONE, key="user | ip")
    def texts(request):
        return HttpResponse()

    @limit(ONE, key=lambda request: request.GET.get("id"))
    def called(request):
        return HttpResponse()

    with override_settings(LIMITKEEPER={"POLICY": policy, "STORE": store}):
        for user in ("ada", "ben"):
            assert statuses(texts, **{"X-User": user}) == [200, 429]
        assert statuses(texts) == [200, 429]
        assert statuses(called, path="/?id=1") == [200, 429]
        assert statuses(called, path="/?id=2") == [200, 429]
        assert statuses(called) == [200, 429]


def test_a_key_from_the_path_is_the_value_that_django_has_converted(store):
    """Values that a converter takes for one value are one key of a view's limit."""
    policy = Policy.read("identify: {order: {path: order}}\nlimits: [{name: a, key: ip, limit: 99/s}]")

    @limit("fixed window 1/min", key="order", match="/orders/{order}")
    def view(request, order):
        return HttpResponse(str(order))

    def status(value):
        request = RequestFactory().get(f"/orders/{value}")
        request.resolver_match = ResolverMatch(view, (), {"order": {"seven": 7}.get(value, value)})
        return view(request, 7).status_code

    with override_settings(LIMITKEEPER={"POLICY": policy, "STORE": store}):
        assert [status(value) for value in ("seven", "7", "07", "8")] == [200, 429, 429, 200]


def test_views_under_one_name_share():
    """Views that are limited under the same name share one limit, whether sync or async."""
    reports = limit("token bucket 1/min burst 2", name="reports")

    @reports
    def first(request):
        return HttpResponse()

    @limit("token bucket 1/min burst 2", name="reports")
    async def second(request):
        return HttpResponse()

    assert [get(view).status_code for view in (first, second, first)] == [200, 200, 429]


def test_a_mistake_is_an_error_at_the_decorator():
    """A limit that can't be read is an error where the decorator is written."""
    with pytest.raises(ConfigurationError):
        limit("5/parsec")(lambda request: None)


def test_a_view_may_degrade(store):
    """A view's limit may name a cheaper view, which gets the same arguments."""

    @limit(ONE, on_refusal="degrade cached")
    def view(request, n):
        return HttpResponse(f"fresh {n}")

    @limit(ONE, on_refusal="degrade cached")
    async def coroutine(request, n):
        return HttpResponse(f"fresh {n}")

    def cached(request, n):
        return HttpResponse(f"cached {n}")

    with override_settings(LIMITKEEPER={"STORE": store, "HANDLERS": {"cached": cached}}):
        for one in (view, coroutine):
            assert [get(one, "/", 7).content for _ in range(2)] == [b"fresh 7", b"cached 7"]


@pytest.mark.parametrize(("error", "counted"), [(Http404, 404), (PermissionDenied, 403), (ValueError, 500)])
def test_exceptions_are_the_outcomes_that_django_makes_of_them(error, counted):
    """A view that raises is settled with the status of the response to its exception."""

    @limit(**FAILURES)
    def view(request):
        raise error("raised")

    @limit(**{**FAILURES, "charge": {"status": [counted]}})
    async def coroutine(request):
        raise error("raised")

    for one in (view, coroutine):
        with pytest.raises(error):
            get(one)
    assert [gate.snapshot().rules[0].given_back for gate in site_gates()._gates.values()] == [0, 0]
    assert [list(gate.snapshot().rules[0].statuses) for gate in site_gates()._gates.values()] == [[f"{counted // 100}xx"]] * 2


def test_outcomes_that_do_not_count_are_given_back():
    """Only failures count: successes are given back."""

    @limit(**FAILURES)
    def view(request):
        return HttpResponse(status=int(request.GET.get("status", 200)))

    assert statuses(view, 20) == [200] * 20
    assert get(view, "/?status=404").status_code == 404
    assert spent(view) == 2


def test_a_template_response_is_settled_when_it_is_rendered():
    """A response that is not rendered yet has no size: it is charged once it has."""
    engine = DjangoTemplates({"NAME": "own", "DIRS": [], "APP_DIRS": False, "OPTIONS": {}})
    template = engine.from_string("{{ word }}")

    @limit(**BYTES)
    def view(request):
        return SimpleTemplateResponse(template, {"word": "x" * 10})

    assert spent(view) == 1
    rendered = get(view).render().headers
    assert int(rendered["X-RateLimit-Limit"]) - int(rendered["X-RateLimit-Remaining"]) == 11
    assert spent(view) == 12


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_template_response_that_cannot_be_afforded_is_not_sent(asynchronous):
    """Its refusal is sent instead, and its estimate stays charged."""
    template = DjangoTemplates({"NAME": "own", "DIRS": [], "APP_DIRS": False, "OPTIONS": {}}).from_string("{{ word }}")

    def view(request):
        return SimpleTemplateResponse(template, {"word": "x" * 900})

    async def async_view(request):
        return view(request)

    limited = limit(**BYTES, name="page")(async_view if asynchronous else view)
    with override_settings(ROOT_URLCONF=Urls([path("", limited)])):
        answers = [Client().get("/") for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 429]
    assert answers[1].json()["code"] == "RATE_LIMITED"
    assert answers[1].headers["Retry-After"]
    assert spent(limited) == 902


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_response_that_is_refused_for_its_size_is_closed(asynchronous):
    """A file that the view has opened is closed when the refusal has been sent."""
    opened = []

    def view(request):
        opened.append(BytesIO(b"x" * 1001))
        return FileResponse(opened[0])

    async def async_view(request):
        return view(request)

    limited = limit(**BYTES, name="file")(async_view if asynchronous else view)
    with override_settings(ROOT_URLCONF=Urls([path("", limited)])):
        assert Client().get("/").status_code == 429
    assert opened[0].closed


def test_a_template_that_fails_gives_its_place_back():
    """A view whose template raises no longer counts as running; a rendered response can be pickled, for a cache."""
    template = DjangoTemplates({"NAME": "dj", "DIRS": [], "APP_DIRS": False, "OPTIONS": {}}).from_string("{{ word }}")

    @limit("9/min", concurrent=1)
    def view(request):
        return SimpleTemplateResponse(template, {"word": request.broken})

    def fails():
        raise ValueError("template")

    for broken in (fails, "fine", "fine"):
        request = RequestFactory().get("/")
        request.broken = broken
        response = view(request)
        assert response.status_code == 200
        with pytest.raises(ValueError) if broken is fails else nullcontext():
            assert pickle.loads(pickle.dumps(response.render())).content == b"fine"


def test_a_mount_point_that_a_client_chose_hides_no_path():
    """DispatcherMiddleware takes the `x` of a target like x/login for a mount point: rules for Django's routes apply too."""
    context = DjangoRequestContext(RequestFactory(SCRIPT_NAME="x").get("/login"))
    assert (context.path, context.routed) == ("x/login", "/login")
    assert DjangoRequestContext(RequestFactory(SCRIPT_NAME="/x").get("/login")).routed is None


@pytest.mark.parametrize("error", [Http404, ValueError])
def test_a_response_of_unknown_size_costs_its_estimate(error):
    """Django, or another middleware, makes the response to a view that raises: its size is not known here."""

    @limit("fixed window 5/min", cost={"response": "1kB", "estimate": 2})
    def view(request):
        raise error

    for _ in range(2):
        with pytest.raises(error):
            get(view)
    assert get(view).status_code == 429


def test_streams_are_settled_when_they_have_gone():
    """A stream costs its bytes, sync and async."""

    @limit(**BYTES)
    def view(request):
        return StreamingHttpResponse(iter([b"four", b"four"]))

    assert b"".join(get(view)) == b"fourfour"
    assert spent(view) == 9

    @limit(**BYTES)
    async def coroutine(request):
        async def pieces():
            yield b"four"

        return StreamingHttpResponse(pieces())

    async def whole():
        response = await coroutine(RequestFactory().get("/"))
        return [chunk async for chunk in response]

    assert asyncio.run(whole()) == [b"four"]
    assert spent(coroutine) == 5


def made_of(function):
    """A class based view of a function, as Django REST framework's `api_view` makes it: all are defined in one place."""

    class Wrapped(View):
        def get(self, request):
            return function(request)

    Wrapped.__name__ = function.__name__
    Wrapped.__module__ = function.__module__
    return Wrapped.as_view()


def test_views_that_one_decorator_made_do_not_share():
    """Functions that a decorator turns into classes have their own names: each counts for itself, twice where listed twice."""

    @limit(ONE)
    @made_of
    def orders(request):
        return HttpResponse()

    @limit("fixed window 9/min")
    @limit(ONE)
    @made_of
    def payments(request):
        return HttpResponse()

    assert statuses(orders) == statuses(payments) == [200, 429]
    assert get(payments).headers["RateLimit-Policy"].count('"payments') == 2


class Shown(View):
    word = ""

    def get(self, request):
        return HttpResponse(self.word)


def test_views_of_one_class_with_other_arguments_do_not_share():
    """`as_view(…)` with other arguments, and views that one function made, are distinguished by their URL patterns."""

    def made(word):
        @limit(ONE)
        async def view(request):
            return HttpResponse(word)

        return view

    urls = [
        *(re_path(rf'^shown\b/(?:"?){word}$', limit(ONE)(Shown.as_view(word=word))) for word in ("users", "orders")),
        *(path(f"made/{word}", made(word)) for word in ("users", "orders")),
    ]
    with override_settings(ROOT_URLCONF=Urls(urls), MIDDLEWARE=[]):
        http = Client()
        for where in ("shown", "made"):
            asked = [http.get(f"/{where}/{word}") for word in ("users", "orders", "users")]
            assert [answer.status_code for answer in asked] == [200, 200, 429]


def test_a_site_without_a_policy_names_its_proxies(store):
    """CLIENT_IP in the setting defines the client; beside a policy it is an error, since the policy defines it."""
    factory = RequestFactory(REMOTE_ADDR="10.0.0.2")

    @limit(ONE)
    def view(request):
        return HttpResponse()

    with override_settings(LIMITKEEPER={"STORE": store, "CLIENT_IP": {"trusted_proxies": ["10.0.0.0/8"]}}):
        clients = ["203.0.113.1", "203.0.113.1", "203.0.113.2"]
        assert [view(factory.get("/", headers={"X-Forwarded-For": one})).status_code for one in clients] == [200, 429, 200]
    policy = Policy.of(limits=[{"name": "site", "limit": "5/s"}])
    with (
        override_settings(LIMITKEEPER={"POLICY": policy, "CLIENT_IP": {"trusted_proxies": ["10.0.0.0/8"]}}),
        pytest.raises(ConfigurationError, match="belongs to the policy"),
    ):
        site_gates()


def test_a_callable_chooses_the_limit_of_a_view():
    """The callable is given the request; methods that are not named, and exempt requests, are not limited."""

    @limit(
        lambda request: {"pro": "fixed window 3/min"}.get(request.headers.get("X-Plan"), "fixed window 1/min"),
        methods=["GET"],
        exempt_when=lambda request: request.headers.get("X-Probe") == "secret",
    )
    def view(request):
        return HttpResponse()

    assert statuses(view) == [200, 429]
    assert statuses(view, 3, X_Plan="pro") == [200, 200, 429]
    assert statuses(view, X_Probe="secret") == [200, 200]
    assert view(RequestFactory().post("/")).status_code == 200


def test_a_callable_chooses_beside_the_identities_of_a_policy(store):
    """A limit from a callable may count by an identity that only the site's policy knows."""
    policy = Policy.of(identify={"user": {"header": "X-User"}}, limits=[{"name": "all", "limit": "100/s"}])

    @limit(lambda request: ONE, key="user | ip")
    def view(request):
        return HttpResponse()

    with override_settings(LIMITKEEPER={"STORE": store, "POLICY": policy}):
        assert statuses(view, X_User="ann") == statuses(view, X_User="ben") == [200, 429]


def test_a_disabled_site_limits_nothing(store):
    """With ENABLED = False neither the policy nor a view's own limit refuses."""
    policy = Policy.of(limits=[{"name": "all", "limit": ONE}])

    @limit(ONE)
    def view(request):
        return HttpResponse()

    with override_settings(LIMITKEEPER={"STORE": store, "POLICY": policy, "ENABLED": False}):
        assert statuses(view, 5) == [200] * 5
        assert site_gates().gate.policy.rules == ()
    assert len(store) == 0
