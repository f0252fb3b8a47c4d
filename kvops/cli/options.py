"""Options that several verbs share."""

from __future__ import annotations

import click

DEFAULT_NAME = "default"

name_option = click.option("--name", default=DEFAULT_NAME, show_default=True, help="The fleet's name.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
