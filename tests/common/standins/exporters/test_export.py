"""Stands in for transformers' tests of its exporters, which its source distribution lacks."""


class ExportTesterMixin:
    """Holds no test: a RecSA forward works with lengths as Python integers and cannot be traced into one graph."""
