"""The porting pages tell how to run other projects' programs as the tests here do."""

import os
import subprocess
import sys

import checkouts
import pytest


@pytest.mark.parametrize("checkout", checkouts.ALL, ids=lambda checkout: checkout.name)
def test_a_page_has_the_versions_that_the_table_has(checkout):
    assert f"\n{checkout.install}\n" in (checkouts.PAGES / checkout.page).read_text()


def test_one_command_says_what_is_missing_and_where_it_is_to_be_had(tmp_path):
    named = checkouts.STOIX
    (tmp_path / named.file).parent.mkdir(parents=True)
    others = {key: value for key, value in os.environ.items() if not key.startswith("JAXVEC_")}
    command = [sys.executable, checkouts.__file__]
    done = subprocess.run(
        command, env=others | {named.variable: str(tmp_path)}, capture_output=True, text=True, check=True
    )
    for checkout in checkouts.ALL:
        if checkout is not named:
            assert f"{checkout.repository}: {checkout.variable} names no checkout" in done.stdout
        assert f"git clone https://github.com/{checkout.repository}\n" in done.stdout
        assert f"\n    {checkout.install}\n" in done.stdout
    assert f"{named.repository}: {named.variable}: there is no {tmp_path / named.file}" in done.stdout
