"""How many requests are in the system, and how long they wait: Little's law and the standard approximations (B10)."""

from __future__ import annotations

from math import inf, log

from headway.core.errors import BadInput


def little(rate: float, seconds: float) -> float:
    """L = lambda * W: mean number inside, from arrivals per second and mean seconds inside. Exact for any part of a
    system whose long-run averages exist; says nothing about peaks."""
    if rate < 0 or seconds < 0:
        raise BadInput("--rate", f"{rate} per second for {seconds} s; accepted: numbers from 0")
    return rate * seconds


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
