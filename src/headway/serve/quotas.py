"""What each key may ask of the server: requests and tokens per minute, and requests at once.

A bucket holds what a key may still use: it fills up at the key's rate, and up to what the rate gives in a minute. A
request is let in while nothing it needs is used up; the tokens it generates are taken when it ends, so a bucket may
be overdrawn, and the next request waits for that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from time import monotonic

import msgspec

from headway.core.errors import BadInput
from headway.serve.errors import ApiError

MINUTE = 60.0
MOST = 10**12


class Quota(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of one key; None = there is none.

    Attributes:
        requests, input_tokens, output_tokens: per minute.
        concurrent: requests at once.
    """

    requests: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    concurrent: int | None = None

    @property
    def untokened(self) -> Quota:
        """What of it can be held without counting tokens."""
        return Quota(requests=self.requests, concurrent=self.concurrent)

    def over(self, other: Quota) -> Quota:
        """This one's limits, and the other's where it has none."""
        mine, others = msgspec.structs.asdict(self), msgspec.structs.asdict(other)
        return Quota(**{name: others[name] if limit is None else limit for name, limit in mine.items()})


class Bucket:
    """What is left of a rate.

    Args:
        rate: per minute; also what it holds at most, and at first.
        now: seconds of any clock.
    """

    def __init__(self, rate: int, now: float) -> None:
        self.rate = rate
        self._level, self._at = float(rate), now

    def level(self, now: float) -> float:
        """What may be taken now; below 0 if it is overdrawn."""
        return min(self.rate, self._level + (now - self._at) * self.rate / MINUTE)

    def take(self, amount: float, now: float) -> None:
        self._level, self._at = self.level(now) - amount, now

    def wait(self, amount: float, now: float) -> float:
        """Seconds until it holds so much."""
        return max(0.0, amount - self.level(now)) * MINUTE / self.rate


class Account:
    """The buckets of one key, and how many of its requests are being answered.

    Attributes:
        quota: its limits.
        active: its requests between admission and last byte.
    """

    def __init__(self, quota: Quota, now: float) -> None:
        self.quota = quota
        self.active = 0
        limits = {"requests": quota.requests, "input tokens": quota.input_tokens, "output tokens": quota.output_tokens}
        self._buckets = {what: Bucket(rate, now) for what, rate in limits.items() if rate is not None}

    def admit(self, input_tokens: int, now: float, generates: bool = True, field: str = "prompt") -> None:
        """Take what a request needs.

        Args:
            generates: it has output tokens, so it waits while those are overdrawn.
            field: what holds its tokens.

        Raises:
            BadInput: it needs more prompt tokens than the key may ever send at once.
            ApiError: 429, the key has used up a limit; nothing was taken.
        """
        quota = self.quota
        if quota.input_tokens is not None and input_tokens > quota.input_tokens:
            raise BadInput(field, f"{input_tokens} tokens; this key may send {quota.input_tokens} a minute")
        if quota.concurrent is not None and self.active >= quota.concurrent:
            problem = f"this key has {self.active} requests in flight, as many as it may"
            raise ApiError(429, problem, code="rate_limit_exceeded", retry_after=1, headers=self.headers(now))
        needed = {
            "requests": 1.0,
            "input tokens": float(input_tokens),
            "output tokens": 1.0 if generates else -math.inf,
        }
        waits = {what: bucket.wait(needed[what], now) for what, bucket in self._buckets.items()}
        what = max(waits, key=lambda name: waits[name], default="")
        if what and waits[what] > 0:
            seconds = max(1, math.ceil(waits[what]))
            problem = f"this key may use {self._buckets[what].rate} {what} a minute; try again in {seconds} s"
            raise ApiError(429, problem, code="rate_limit_exceeded", retry_after=seconds, headers=self.headers(now))
        for name, bucket in self._buckets.items():
            bucket.take(0.0 if name == "output tokens" else needed[name], now)
        self.active += 1

    def done(self, output_tokens: int, now: float) -> None:
        """A request that was admitted has ended."""
        self.active -= 1
        bucket = self._buckets.get("output tokens")
        if bucket is not None:
            bucket.take(output_tokens, now)

    def headers(self, now: float) -> dict[str, str]:
        """What is left, as SDKs read it: x-ratelimit-*, of requests and of the scarcer kind of tokens."""
        kinds = {"requests": ["requests"], "tokens": ["input tokens", "output tokens"]}
        shown = {}
        for kind, names in kinds.items():
            buckets = [self._buckets[name] for name in names if name in self._buckets]
            if not buckets:
                continue
            bucket = min(buckets, key=lambda one: one.level(now) / one.rate)
            shown[f"x-ratelimit-limit-{kind}"] = str(bucket.rate)
            shown[f"x-ratelimit-remaining-{kind}"] = str(max(0, math.floor(bucket.level(now))))
            shown[f"x-ratelimit-reset-{kind}"] = f"{bucket.wait(bucket.rate, now):.3f}s"
        return shown


class Quotas:
    """The accounts of all keys.

    Args:
        default: limits of keys that have none of their own.
        own: limits by tenant.
        clock: seconds.
    """

    def __init__(
        self, default: Quota, own: Mapping[str, Quota] | None = None, clock: Callable[[], float] = monotonic
    ) -> None:
        self._default = default
        self._own = own or {}
        self._clock = clock
        self._accounts: dict[str, Account] = {}  # as many as there are keys at most

    def admit(self, tenant: str, input_tokens: int, generates: bool = True, field: str = "prompt") -> Lease:
        """Let a request in, or raise as `Account.admit` does. Close what is returned when the request has ended."""
        account, now = self._account(tenant), self._clock()
        account.admit(input_tokens, now, generates, field)
        return Lease(account, self._clock, account.headers(now))

    def _account(self, tenant: str) -> Account:
        if tenant not in self._accounts:
            quota = self._own.get(tenant, Quota()).over(self._default)
            self._accounts[tenant] = Account(quota, self._clock())
        return self._accounts[tenant]


class Lease:
    """A request that was let in.

    Attributes:
        headers: for its answer.
    """

    def __init__(self, account: Account, clock: Callable[[], float], headers: Mapping[str, str]) -> None:
        self._account: Account | None = account
        self._clock = clock
        self.headers = [(name.encode(), value.encode()) for name, value in headers.items()]

    def close(self, output_tokens: int) -> None:
        """It has ended, having generated so much; idempotent."""
        account, self._account = self._account, None
        if account is not None:
            account.done(output_tokens, self._clock())


def read_quota(words: list[str]) -> Quota:
    """Limits as a line of the keys file has them: `requests=60 input_tokens=100000`.

    Raises:
        BadInput: a word is no limit.
    """
    limits: dict[str, int] = {}
    for word in words:
        name, _, number = word.partition("=")
        if name not in Quota.__struct_fields__ or not number.isdecimal() or not 1 <= int(number[:20]) <= MOST:
            names = ", ".join(Quota.__struct_fields__)
            raise BadInput("--api-key-file", f"{word[:60]!r} is no limit; accepted: NAME=NUMBER, NAME one of {names}")
        if name in limits:
            raise BadInput("--api-key-file", f"{name} stands twice in one line")
        limits[name] = int(number)
    return Quota(**limits)
