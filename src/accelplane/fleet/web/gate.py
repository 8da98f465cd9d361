"""Who may open the page: everyone on the loopback interface, or users with a token or a session.

Users are authenticated by a bearer token, by a session that began with a token in a form, or by the header fields of a
proxy with a client certificate. They need the right to `get` the path `/fleet`.
"""

import shlex
from collections.abc import Mapping, Sequence
from urllib.parse import unquote_plus

from accelplane.authorized import CHALLENGE, PageAccess, UserInfo
from accelplane.http.listening import is_own_host
from accelplane.http.messages import HttpError, Request, Response

from .access import ALL_PODS, METRICS, PAGE, Access, Viewer, hash_of
from .html import element
from .page import Assets, plain_document
from .query import fields_of, link, query_of
from .screens import PATHS
from .security import page_response, redirect
from .sessions import COOKIE, Sessions, cookie_of

_MAX_TOKEN = 16 * 1024
_MAX_NAME = 1024
_MAX_GROUPS = 64


class Gate:
    """Decides about requests of one listener. This one admits everyone.

    With `loopback_only`, the address in the URL has to be one of the own machine.
    """

    def __init__(self, *, loopback_only: bool = False) -> None:
        self._loopback_only = loopback_only

    @property
    def access(self) -> Access | None:
        """The rights of viewers; None where everything is shown."""
        return None

    async def admit(self, request: Request, *, page: bool = True) -> Viewer | Response:
        """The viewer, or the response to one who is not admitted. Raises `HttpError`."""
        if self._loopback_only and not is_own_host(request.fields.get("host", "")):
            raise HttpError(421, "expected the address localhost or 127.0.0.1; use the secure address for other names")
        return Viewer(source=request.source)

    async def admit_scraper(self, request: Request) -> None:
        """Raises `HttpError` for one who may not read the metrics."""
        await self.admit(request)

    async def still_admitted(self, request: Request, viewer: Viewer, *, everything: bool) -> bool:
        """Whether the viewer of a request may continue to read updates, with all names if these were shown."""
        return True

    async def sign_in(self, request: Request) -> Response:
        """Begins a session with the token of a form. Raises `HttpError`."""
        return redirect("./")

    async def sign_out(self, request: Request) -> Response:
        """Ends a session. Raises `HttpError`."""
        return redirect("./")


class SecureGate(Gate):
    """Admits users that the API server authorizes.

    `scrapers` reviews tokens of scrapers that are not valid for users: Prometheus sends that of its account, whose
    audience is the API server. `token_command` is shown beside the form as an example. `proxies` are the common names
    of certificates whose owners name the user; all may if it is empty, nobody if it is None.
    """

    def __init__(
        self,
        access: Access,
        assets: Assets,
        *,
        scrapers: Access | None = None,
        proxies: tuple[str, ...] | None = None,
        sessions: Sessions | None = None,
        token_command: str = "",
    ) -> None:
        super().__init__()
        self._access = access
        self._assets = assets
        self._scrapers = scrapers
        self._proxies = proxies
        self._sessions = sessions or Sessions()
        self._token_command = token_command or token_command_of("", ())

    @property
    def access(self) -> Access | None:
        return self._access

    async def admit(self, request: Request, *, page: bool = True) -> Viewer | Response:
        viewer = await self._authenticate(request)
        if viewer is None:
            if page and not request.authorization:
                return self._form(401, "", _next(request))
            problem = "expected a valid token in the header Authorization: Bearer TOKEN, or a session"
            raise HttpError(401, problem, CHALLENGE)
        await self._authorize(viewer, PAGE)
        return viewer

    async def admit_scraper(self, request: Request) -> None:
        token, viewer = _bearer_token(request), None
        # First: most scrapers send such a token, and tokens without a known user wait for a review.
        if token and self._scrapers is not None:
            user = await self._scrapers.user_of(token)
            viewer = Viewer(user) if user is not None else None
        viewer = viewer or await self._authenticate(request)
        if viewer is None:
            raise HttpError(401, "expected a valid token in the header Authorization: Bearer TOKEN", CHALLENGE)
        await self._authorize(viewer, METRICS)

    async def still_admitted(self, request: Request, viewer: Viewer, *, everything: bool) -> bool:
        try:
            current = await self._authenticate(request)
            # The screen is made with the rights of the first user. A token with other groups needs another screen.
            if current is None or current.user is None or current.user != viewer.user:
                return False
            user = current.user
            allowed = await self._access.allowed(user, PAGE)
            return allowed and (not everything or await self._access.allowed(user, ALL_PODS))
        except HttpError:
            return False

    async def sign_in(self, request: Request) -> Response:
        _check_origin(request)
        fields = _form_fields(request)
        token, target = fields.get("token", "").strip(), _target(fields.get("next", ""))
        if not token:
            return self._form(401, "Found no token, expected one.", target)
        user = await self._access.user_of(token)
        if user is None:
            return self._form(401, "This token is not valid here, or it has expired.", target)
        await self._authorize(Viewer(user), PAGE)
        identifier, seconds = self._sessions.create(token)
        return redirect(target, {"Set-Cookie": cookie_of(identifier, seconds)})

    def _is_proxy(self, request: Request) -> bool:
        name = request.certificate_name
        return self._proxies is not None and bool(name) and (not self._proxies or name in self._proxies)

    async def sign_out(self, request: Request) -> Response:
        _check_origin(request)
        self._sessions.remove(_cookie(request))
        return redirect("./", {"Set-Cookie": cookie_of("", 0)})

    async def _authenticate(self, request: Request) -> Viewer | None:
        """Raises `HttpError`."""
        if request.authorization:
            token = _bearer_token(request)
            user = await self._access.user_of(token) if token else None
            return Viewer(user, credential=hash_of(token).hex()) if user is not None else None
        if self._is_proxy(request) and (user := _proxy_user(request)) is not None:
            return Viewer(user)
        identifier = _cookie(request)
        user = await self._session_user(identifier) if identifier else None
        token = self._sessions.token(identifier)
        # The session may have ended during the review.
        return Viewer(user, identifier, hash_of(token).hex()) if user is not None and token else None

    async def _session_user(self, identifier: str) -> UserInfo | None:
        """Raises `HttpError`."""
        token = self._sessions.token(identifier)
        user = await self._access.user_of(token) if token else None
        if token and user is None:
            self._sessions.remove(identifier)
        return user

    async def _authorize(self, viewer: Viewer, access: PageAccess) -> None:
        """Raises `HttpError`."""
        if viewer.user is None or not await self._access.allowed(viewer.user, access):
            role = "accelplane-fleet-viewer" if access is PAGE else "accelplane-fleet-metrics-reader"
            raise HttpError(403, f"{viewer.name} may not {access.verb} {access.path}; bind the ClusterRole {role}")

    def _form(self, status: int, problem: str, target: str) -> Response:
        content = (
            element("p", "Paste a token of this cluster, for example of this command:"),
            element(
                "pre",
                element("code", self._token_command),
                tabindex="0",
                role="group",
                aria_label="Command",
            ),
            element(
                "form",
                element("input", type="hidden", name="next", value=target),
                element(
                    "label",
                    "Token ",
                    element("input", type="password", name="token", required=True, autocomplete="off", maxlength=8192,
                            aria_describedby="problem" if problem else None),
                ),
                element("button", "Sign in", type="submit"),
                method="post",
                action="login",
                class_="filters",
            ),
        )  # fmt: skip
        notice = (element("p", problem, id="problem", role="alert", class_="notice"),) if problem else ()
        return page_response(status, plain_document("Sign in", (*notice, *content), self._assets))


def token_command_of(namespace: str, audiences: Sequence[str]) -> str:
    """The command for a token of the viewers' account, which the manifests create in the namespace of the server."""
    words = ["kubectl create token accelplane-fleet-viewer --duration 8h"]
    words += [f"--audience {shlex.quote(audiences[0])}"] if audiences else []
    words += [f"--namespace {namespace}"] if namespace else []
    return " ".join(words)


def _bearer_token(request: Request) -> str:
    scheme, _, rest = request.authorization.partition(" ")
    token = rest.strip()
    return token if scheme.lower() == "bearer" and len(token) <= _MAX_TOKEN else ""


def _check_origin(request: Request) -> None:
    """Raises `HttpError` for a form of another site."""
    if request.fields.get("origin") != f"https://{request.fields.get('host', '')}":
        raise HttpError(403, "expected a form of this site")


def _form_fields(request: Request) -> Mapping[str, str]:
    text = bytes(request.body).decode("ascii", "replace")
    pairs = (pair.partition("=")[::2] for pair in text.split("&")[:8])
    return {name: unquote_plus(value)[:_MAX_TOKEN] for name, value in pairs}


def _target(text: str) -> str:
    """A relative address of a screen; the first screen for any other text."""
    path, _, query = text.partition("?")
    name = PATHS.get(f"/{path.removeprefix('./')}")
    if name is None or name == "overview":
        return "./"
    # Only the fields of the screen remain: other names would enter the header field Location without escaping.
    return link(name, query_of(fields_of(query)))


def _next(request: Request) -> str:
    return _target(f"{request.path[1:]}?{request.query}")


def _cookie(request: Request) -> str:
    pairs = (pair.strip().partition("=") for pair in request.fields.get("cookie", "").split(";")[:64])
    return next((value for name, _, value in pairs if name == COOKIE), "")


def _proxy_user(request: Request) -> UserInfo | None:
    user = request.fields.get("x-remote-user", "")
    groups = [group for each in request.fields.get("x-remote-group", "").split(",") if (group := each.strip())]
    if not user or "," in user or len(user) > _MAX_NAME or len(groups) > _MAX_GROUPS:
        return None
    return UserInfo(username=user, groups=groups)
