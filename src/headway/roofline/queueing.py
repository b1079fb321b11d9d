"""How many requests are in the system, and how long they wait: Little's law and the standard approximations (B10)."""

from __future__ import annotations

from math import exp, inf, log, sqrt

import msgspec

from headway.core.errors import BadInput

Z99 = 2.326  # standard normal quantile at 99 %


class InSystem(msgspec.Struct, frozen=True):
    """Mean number of requests in each part, and in all."""

    queue: float
    prefill: float
    decode: float

    @property
    def total(self) -> float:
        return self.queue + self.prefill + self.decode


def little(rate: float, seconds: float) -> float:
    """L = lambda * W: mean number inside, from arrivals per second and mean seconds inside. Exact for any part of a
    system whose long-run averages exist; says nothing about peaks."""
    if rate < 0 or seconds < 0:
        raise BadInput("--rate", f"{rate} per second for {seconds} s; accepted: numbers from 0")
    return rate * seconds


def in_system(rate: float, queue: float, prefill: float, decode: float) -> InSystem:
    """Little's law for each part of a request's life, given the mean seconds spent there."""
    return InSystem(little(rate, queue), little(rate, prefill), little(rate, decode))


def occupancy_peak(mean: float, quantile_z: float = Z99) -> float:
    """A high quantile of the number inside when Poisson arrivals are not turned away (M/G/infinity: the number is
    Poisson with this mean), by the normal approximation. Memory must hold this, not the mean."""
    return mean + quantile_z * sqrt(mean)


def queue_seconds(utilisation: float, service: float, arrival_cv2: float = 1.0, service_cv2: float = 1.0) -> float:
    """Mean wait before one server: rho/(1-rho) * (Ca^2 + Cs^2)/2 * service (Kingman; exact for M/M/1 and M/G/1).
    Infinite once the server is offered all it can do. cv2: squared coefficients of variation."""
    if utilisation < 0:
        raise BadInput("utilisation", f"{utilisation}; accepted: a number from 0")
    if utilisation >= 1:
        return inf
    return utilisation / (1.0 - utilisation) * (arrival_cv2 + service_cv2) / 2.0 * service


def queue_quantile(utilisation: float, mean_wait: float, share: float) -> float:
    """Wait that `share` of requests do not exceed: with probability 1 - rho there is none, else it is exponential with
    mean `mean_wait / rho` (exact for M/M/1)."""
    if mean_wait == inf:
        return inf
    if utilisation <= 0 or mean_wait <= 0 or share <= 1 - utilisation:
        return 0.0
    return -mean_wait / utilisation * log((1.0 - share) / utilisation)


def erlang_wait(servers: int, offered: float) -> float:
    """Erlang C: probability that an arrival waits, with `offered` = rate * service seconds on `servers` servers."""
    if offered >= servers:
        return 1.0
    blocked = 1.0
    for n in range(1, servers + 1):  # Erlang B by its recurrence
        blocked = offered * blocked / (n + offered * blocked)
    return blocked / (1.0 - offered / servers * (1.0 - blocked))


def poisson_tail(mean: float, at_least: int) -> float:
    """Probability that a Poisson number is at least `at_least`: how often a fixed number of seats is too few."""
    if mean > 700:  # exp(-mean) underflows; the normal approximation is exact to four digits here
        from math import erfc

        return 0.5 * erfc((at_least - 0.5 - mean) / sqrt(2.0 * mean))
    below, term = 0.0, exp(-mean)
    for n in range(at_least):
        below += term
        term *= mean / (n + 1)
    return max(0.0, 1.0 - below)
