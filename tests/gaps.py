"""What a framework cannot give: a row is a strict xfail, so that it goes when its reason does. At most five rows."""

GAPS: dict[tuple[str, str], str] = {}
"""(backend, test or conformance case): the reason, with the framework's own issue"""
