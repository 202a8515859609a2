"""For other projects' tests: the contracts of frontiers (`contract`, `machine`) and of dispatches
(`dispatch`), and a clock that tests move (`clock`)."""

from shoal.demo.site import Call, LoopbackSite, Reply

__all__ = ["Call", "LoopbackSite", "Reply"]
