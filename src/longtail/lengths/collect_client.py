"""One question to an OpenAI-compatible server: its answer, or why there is none and whether to try again.

The API key goes into the request's header and nowhere else: it is cut out of everything that a server says before that
is shown, and redirects, which could carry it elsewhere, are not followed.
"""

from __future__ import annotations

import ipaddress
import json
import math
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx

from longtail.core.errors import ConfigError, ServerError
from longtail.lengths.data_prompts import Prompt
from longtail.lengths.messages import prompt_text

RETRY_STATUS = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529})
CONNECT_S = 15.0


class Retry(Exception):
    """This try failed; another one may not. ``after_s`` is the pause that the server asks for; ``busy`` means that it
    has too much to do, so that other requests had better wait too."""

    def __init__(self, problem: str, after_s: float | None = None, *, busy: bool = False) -> None:
        super().__init__(problem)
        self.after_s, self.busy = after_s, busy


class Refused(Exception):
    """The server will not answer this prompt."""


def base_url(url: str) -> str:
    """The URL below which the API's paths lie: ``/v1`` is added to a bare host. Raises :class:`ConfigError`."""
    text = url.strip().rstrip("/")
    if "://" not in text:
        raise ConfigError(f"the URL {url!r} must begin with http:// or https://, as in http://localhost:8000")
    try:
        parts = urlsplit(text)
        bad = parts.scheme not in ("http", "https") or not parts.hostname
        _ = parts.port  # raises for what is no port
    except ValueError:
        bad = True
    if bad:
        raise ConfigError(f"{url!r} is no URL of a server; it should look like http://localhost:8000")
    path = parts.path
    for ending in ("/chat/completions", "/completions", "/models"):
        path = path.removesuffix(ending)
    return urlunsplit((parts.scheme, parts.netloc, path or "/v1", "", ""))


class Client:
    """Asks one server. Until a first answer has come (``answered``), what would fail for every prompt is a
    :class:`ServerError`; after that it fails the one request. Use as an async context manager.
    """

    def __init__(self, url: str, *, api_key: str | None, timeout_s: float, connections: int) -> None:
        """Raises :class:`ConfigError` for a URL or a key that cannot be."""
        self.url = base_url(url)
        self.answered = False
        self._api_key, self._timeout_s = api_key, timeout_s
        self._limit_name = "max_tokens"
        headers = {"User-Agent": "longtail", "Content-Type": "application/json"}
        if api_key is not None:
            headers["Authorization"] = f"Bearer {api_key}"
        try:
            self._http = httpx.AsyncClient(
                headers=headers,
                timeout=httpx.Timeout(timeout_s, connect=min(CONNECT_S, timeout_s)),
                limits=httpx.Limits(max_connections=connections),
                trust_env=not _is_loopback(self.url),  # a proxy does not know this machine's own servers
            )
        except (ValueError, httpx.InvalidURL) as error:  # an error of ASCII coding is a ValueError
            raise ConfigError(f"the API key or a proxy's address cannot be used ({type(error).__name__})") from None

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.aclose()

    @property
    def shown_url(self) -> str:
        """The URL without a user and a password in it."""
        parts = urlsplit(self.url)
        return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))

    async def only_model(self) -> str:
        """The name of the one model that the server has. Raises :class:`ServerError` if it has not exactly one."""
        try:
            response = await self._send("GET", "/models")
            if response.status_code != 200:
                self._refuse_all(response, "/models", model=None)
                raise Retry(f"HTTP {response.status_code}{self._detail(response)}")
            listed = self._json_of(response).get("data")
        except Retry as error:
            raise ServerError(f"{self.shown_url}/models: {error}; name a model with --model") from None
        names = [m["id"] for m in listed or [] if isinstance(m, dict) and isinstance(m.get("id"), str)]
        if len(names) == 1:
            return names[0]
        if not names:
            raise ServerError(f"{self.shown_url}/models lists no model: name one with --model")
        some = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        raise ServerError(f"{self.shown_url} has {len(names)} models; choose one with --model: {some}")

    async def ask(
        self, prompt: Prompt, *, model: str, chat: bool, max_tokens: int | None, temperature: float | None
    ) -> dict[str, Any]:
        """The server's whole answer. Raises :class:`Retry`, :class:`Refused` or :class:`ServerError`."""
        body: dict[str, Any] = {"model": model}
        if chat:
            body["messages"] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        else:
            body["prompt"] = prompt_text(prompt)
        if max_tokens is not None:
            body[self._limit_name] = max_tokens
        if temperature is not None:
            body["temperature"] = temperature
        path = "/chat/completions" if chat else "/completions"
        response = await self._send("POST", path, json.dumps(body).encode("ascii"))
        if response.status_code == 200:
            answer = self._json_of(response)
            if not isinstance(answer.get("choices"), list) or not answer["choices"]:
                raise Retry(f"an answer without choices{self._error_text(answer)}")
            self.answered = True
            return answer
        detail = self._detail(response)
        if response.status_code == 400 and "max_tokens" in body and "max_completion_tokens" in detail:
            self._limit_name = "max_completion_tokens"  # what newer models of OpenAI call it
            raise Retry(detail, after_s=0.0)
        if response.status_code in RETRY_STATUS:
            busy = response.status_code in (429, 503, 529)
            raise Retry(f"HTTP {response.status_code}{detail}", _retry_after(response), busy=busy)
        if not self.answered:
            self._refuse_all(response, path, model=model)
        raise Refused(f"HTTP {response.status_code}{detail}")

    async def _send(self, method: str, path: str, content: bytes | None = None) -> httpx.Response:
        try:
            return await self._http.request(method, self.url + path, content=content)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            if not self.answered:
                reason = f"no server answers there ({_reason(error)})"
                raise ServerError(f"{self.shown_url}: {reason}: is it running, and is the URL right?") from None
            raise Retry(f"no connection ({_reason(error)})") from None
        except httpx.TimeoutException:
            raise Retry(f"no answer within {self._timeout_s:g} s") from None
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise Retry(f"the connection broke ({_reason(error)})") from None
        except (httpx.InvalidURL, UnicodeError) as error:
            raise ServerError(f"{self.shown_url}: this URL cannot be asked: {_reason(error)}") from None

    def _refuse_all(self, response: httpx.Response, path: str, *, model: str | None) -> None:
        """Raise :class:`ServerError` for a status that will be the same for every prompt."""
        status, where, detail = response.status_code, f"{self.shown_url}{path}", self._detail(response)
        if status in (401, 403):
            wanted = "it wants an API key: name the environment variable that holds it with --api-key-env"
            key = "it refuses the API key" if self._api_key else wanted
            raise ServerError(f"{where}: {key} (HTTP {status}{detail})")
        if status in (404, 405):
            missing = f"there is no model {model!r}, or " if model else ""
            advice = "look at --model and the URL" if model else "look at the URL"
            raise ServerError(f"{where}: {missing}this is no OpenAI-compatible API (HTTP {status}{detail}); {advice}")
        if 300 <= status < 400:
            target = self._redacted(response.headers.get("location", "elsewhere"))
            raise ServerError(f"{where}: the server redirects to {target}; give that URL itself")

    def _detail(self, response: httpx.Response) -> str:
        try:
            return self._error_text(json.loads(response.text))
        except (ValueError, RecursionError):
            return f": {self._redacted(response.text)}" if response.text.strip() else ""

    def _error_text(self, body: Any) -> str:
        """``: message`` of an error as OpenAI, vLLM, FastAPI and others word it, or nothing."""
        error = body.get("error", body.get("detail", body.get("message"))) if isinstance(body, dict) else body
        if isinstance(error, dict):
            error = error.get("message", error)
        return f": {self._redacted(error if isinstance(error, str) else json.dumps(error))}" if error else ""

    def _json_of(self, response: httpx.Response) -> dict[str, Any]:
        try:
            body = json.loads(response.text)
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            raise Retry(f"an answer that is not a JSON object: {self._redacted(response.text[:60])!r}")
        return body

    def _redacted(self, text: str) -> str:
        if self._api_key:
            text = text.replace(self._api_key, "[the API key]")
        text = " ".join(text.split())
        return text if len(text) <= 200 else text[:197] + "..."


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _retry_after(response: httpx.Response) -> float | None:
    """Seconds of the Retry-After header, which is a number or a date; None without a usable one."""
    text = response.headers.get("retry-after", "").strip()
    try:
        seconds = float(text)
        return max(0.0, seconds) if math.isfinite(seconds) else None
    except ValueError:
        pass
    try:
        when = parsedate_to_datetime(text)
        return max(0.0, (when.replace(tzinfo=when.tzinfo or UTC) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return None


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__
