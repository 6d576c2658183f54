"""Shared set-up: no test reaches the network; the data folder beside the repository is optional."""

from __future__ import annotations

import functools
import gc
import ssl
import sys
from pathlib import Path

import pytest
from pytest_socket import disable_socket, enable_socket

SHARED = Path(__file__).resolve().parents[2] / "shared"


def pytest_configure() -> None:
    """Lets clients share their certificates, which each of them would read again."""
    ssl.create_default_context = functools.cache(ssl.create_default_context)


def pytest_collection() -> None:
    """Spares the collector the rounds over what imports leave, which stays anyway."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Takes what imports left out of the collector's rounds from here on: many tests ask for one."""
    gc.collect()
    gc.freeze()
    gc.enable()


VAULT = Path(__file__).parent / "unit_tests" / "privacy"
LONG = frozenset(
    [
        "test_a_larger_pool_than_the_declared_one_is_found",
        "test_a_query_adds_a_few_hundred_bytes_to_a_ledger_in_memory",
        "test_a_row_that_appears_or_vanishes_moves_the_sum_within_the_bound",
        "test_a_row_that_changes_moves_the_statistic_by_at_most_one",
        "test_a_row_that_changes_moves_the_sum_within_the_bound",
        "test_a_wrong_number_of_batches_is_refused",
        "test_all_that_a_plan_leaves_is_one_share_at_its_default_delta",
        "test_any_cutting_into_batches_and_any_order_gives_the_same_bits",
        "test_any_rows_become_rows_of_the_domain",
        "test_calibrated_noise_fits",
        "test_calibration_finds_the_listed_noise",
        "test_choices_cost_at_least_the_attack_and_at_most_every_theorem",
        "test_constants_on_rows_and_on_the_public_logits_change_nothing",
        "test_counts_are_never_ignored",
        "test_declared_rounding_covers_what_the_transform_loses",
        "test_each_row_is_bounded_by_itself_and_order_does_not_matter",
        "test_every_sequence_has_the_probability_of_the_definition",
        "test_every_token_and_every_run_counts",
        "test_floats_off_the_grid_add_up_to_more_than_one_sum",
        "test_gaussian_allocations_cost_what_another_accountant_says",
        "test_many_labels_that_differ_in_size_cost_one_price",
        "test_many_rows_add_exactly",
        "test_more_batches_cost_less_and_never_more_than_one_batch",
        "test_no_mechanism_that_adapts_to_earlier_batches_costs_more",
        "test_no_transcript_tells_more_than_the_price",
        "test_no_two_vectors_of_the_ball_are_told_apart_better_than_opposite_ones",
        "test_noise_is_within_its_error_budget_of_the_ideal_real",
        "test_one_step_more_never_costs_less",
        "test_order_and_grouping_of_composition_do_not_matter",
        "test_removing_one_unit_changes_at_most_the_slot_it_was_in",
        "test_rounding_to_the_nearest_step_turns_the_domain_test_red",
        "test_split_data_cost_two_labels_at_most_under_replace_one",
        "test_the_profile_is_the_integral_it_stands_for",
        "test_the_published_few_shot_table_is_reproduced",
        "test_the_published_runs_cost_more_where_a_record_is_replaced",
        "test_the_utility_moves_within_twice_the_range_of_the_counts",
        "test_unit_vectors_keep_their_direction_and_their_integer_length_cannot_overflow",
    ]
)
"""Tests of the vault that take seconds, and pass no branch that shorter ones do not: they run untraced."""


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks the tests of tests, which have to turn red (`make planted`), and those that the coverage is taken of."""
    name = item.nodeid.split("::", 1)[-1].split("[")[0]
    if "plant" in name.lower():
        item.add_marker("planted")
    if VAULT in item.path.parents and name.split("::")[-1] not in LONG:
        item.add_marker("traced")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Closes sockets; asyncio's own pair stays, and `loopback` tests may reach this machine only."""
    if item.get_closest_marker("loopback"):
        enable_socket()
        from pytest_socket import socket_allow_hosts

        leave_dropped_clients_alone()
        socket_allow_hosts(["127.0.0.1", "::1", "localhost"], allow_unix_socket=True)
    else:
        disable_socket(allow_unix_socket=True)


ASYNC_CLIENTS = (
    ("openai._base_client", "AsyncHttpxClientWrapper"),
    ("langchain_openai.chat_models._client_utils", "_AsyncHttpxClientWrapper"),
    ("anthropic._base_client", "AsyncHttpxClientWrapper"),
    ("langchain_anthropic._client_utils", "_AsyncHttpxClientWrapper"),
)


def leave_dropped_clients_alone() -> None:
    """Lets the collector close the sockets of dropped clients, and nobody else.

    An SDK's client that is collected asks the running loop to close its connections later. Their sockets are closed by
    then: the loop stops reading file numbers that belong to another test's connections, which then wait for ever.
    """
    for module, name in ASYNC_CLIENTS:
        client = getattr(sys.modules.get(module), name, None)
        if client is not None and "__del__" in vars(client):
            del client.__del__


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of reference numbers and benchmark data, where a checkout has one."""
    if not SHARED.is_dir():
        pytest.skip("no shared folder beside this checkout")
    return SHARED
