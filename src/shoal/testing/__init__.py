"""For the tests of others: the contract of a frontier (`contract`, `machine`) and of a dispatch (`dispatch`),
a clock that tests move (`clock`), and sites on loopback, so that a scraper's tests need no network."""

from shoal.demo.site import Call, LoopbackSite, Reply

__all__ = ["Call", "LoopbackSite", "Reply"]
