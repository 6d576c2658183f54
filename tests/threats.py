"""Every threat and fault that we know of, with the tests that meet it. `tests/unit_tests/test_threats.py` keeps it true.

A test is named by file and function, from `tests/` on; `faults: L1` stands for the trials of `make faults` (a few of each
run with the tests). What has no test has a reason, which the page of known limitations must tell.
"""

from __future__ import annotations

from dataclasses import dataclass

NEIGHBOURS = "contracts/neighbours.py"
VOTING = "unit_tests/voting/test_voting_neighbours.py"
LABELLING = "unit_tests/runs/test_pate_neighbours.py"
TRAINING = "unit_tests/audit/test_training_neighbours.py"
FREE = "unit_tests/free_form/test_free_form_privacy.py"
ROOMS = "integration_tests/test_provider_faults_rooms.py"
ROWS = "integration_tests/test_provider_faults.py"
RECORDS = "unit_tests/test_hostile_records.py"
LEDGER = "unit_tests/privacy/ledger/test_ledger.py"
INTEGRITY = "unit_tests/privacy/ledger/test_ledger_integrity.py"
STORES = "contracts/store.py"
SQLITE = "unit_tests/stores/test_sqlite.py"
ASYNC = "unit_tests/backends/test_async_ledger.py"
PRACTICE = "unit_tests/budget/test_budget_in_practice.py"
POSTGRES = "integration_tests/test_postgres_faults.py"
RATES = "statistical_tests/test_sampling_rates.py"
RUNNABLES = "unit_tests/runs/test_runnables.py"
MEMO = "unit_tests/runs/test_query_memo.py"
EVOLUTION = "unit_tests/evolution/test_evolution_privacy.py"
RETRIEVAL = "unit_tests/retrieval/test_retrieval.py"
CLUSTER = "integration_tests/test_ray_cluster.py"
MATRIX = "integration_tests/test_leak_matrix.py::test_naive_leaks_and_ours_does_not"


@dataclass(frozen=True)
class Threat:
    """A row of the catalogue.

    Attributes:
      words: the threat or fault.
      tests: what meets it.
      limit: words of the page of known limitations, where something of it stays open.
    """

    words: str
    tests: tuple[str, ...]
    limit: str = ""


THREATS: dict[str, Threat] = {
    # --- ledger -------------------------------------------------------------------------------------------------------
    "L1": Threat(
        "64 contenders on a budget for 10",
        (
            "faults: L1",
            f"{STORES}::test_contenders_on_one_ledger_get_exactly_the_tickets_there_are",
            f"{STORES}::test_only_one_writer_at_a_time",
            f"{LEDGER}::test_threads_get_exactly_the_tickets_there_are",
            f"{PRACTICE}::test_workers_that_start_together_find_the_share_that_one_of_them_sealed",
        ),
    ),
    "L2": Threat(
        "kill -9 at any moment",
        (
            "faults: L2",
            f"{LEDGER}::test_a_crash_after_reserving_keeps_the_charge",
            f"{CLUSTER}::test_a_killed_worker_loses_its_burnt_ticket_and_nothing_else",
            f"{CLUSTER}::test_a_killed_driver_loses_nothing_that_was_released",
        ),
    ),
    "L3": Threat(
        "a torn, removed or deleted log",
        (
            "faults: L3",
            "unit_tests/stores/test_sqlite_logs.py::test_what_others_wrote_since_stands",
            "unit_tests/stores/test_sqlite_logs.py::test_where_nobody_wrote_since_nothing_is_lost",
            "unit_tests/stores/test_sqlite_logs.py::test_no_more_is_granted_than_the_budget_and_what_the_log_held",
            "unit_tests/stores/test_file_guards.py::test_a_file_of_an_open_ledger_is_not_opened",
        ),
        limit="Deleting `-wal` and `-shm` under a live ledger",
    ),
    "L4": Threat(
        "disk full, quota, read-only",
        (
            "faults: L4",
            f"{POSTGRES}::test_what_does_not_fit_was_never_there",
            "unit_tests/stores/test_file_guards.py::test_an_anchor_that_cannot_be_made_leaves_nothing",
            "unit_tests/cli/test_cli_ledger_places.py::test_who_may_only_read_is_told_to_read_an_export",
            f"{PRACTICE}::test_a_ledger_that_is_out_behind_the_commit_loses_no_paid_answer",
        ),
    ),
    "L5": Threat(
        "bit rot, edits by hand",
        (
            "faults: L5",
            f"{INTEGRITY}::test_a_changed_ledger_is_found_and_grants_nothing",
            "unit_tests/stores/test_sqlite_bindings.py::test_bindings_that_are_not_those_of_the_lines_are_refused",
        ),
    ),
    "L6": Threat(
        "a restored or cloned ledger",
        ("faults: L6", f"{INTEGRITY}::test_a_ledger_that_went_back_in_time_grants_nothing"),
        limit="A complete older copy of a ledger that is restored looks valid",
    ),
    "L7": Threat(
        "no ledger, another's, another version, another name of it",
        (
            "faults: L7",
            f"{STORES}::test_opening_makes_no_ledger",
            f"{SQLITE}::test_another_version_is_refused",
            f"{SQLITE}::test_every_name_of_a_file_is_the_same_ledger",
            "contracts/bindings.py::test_a_data_set_has_one_ledger_of_a_place",
            "integration_tests/test_postgres_bindings.py::test_the_handler_finishes_one_and_opening_does_not",
            "unit_tests/cli/test_cli_ledger_places.py::test_a_file_of_two_hard_links_is_refused_by_both_names_until_one_is_left",
        ),
        limit="One `dataset_id` on two ledgers",
    ),
    "L8": Threat("somebody who holds the lock", ("faults: L8",)),
    "L9": Threat("a clock that jumps", ("faults: L9",)),
    "L10": Threat(
        "cancelled or stopped between reserve and commit",
        ("faults: L10", f"{ASYNC}::test_cancelled_at_any_wait_the_charge_stays_and_nothing_is_left_half_done"),
        limit="An answer that was released is lost if the ledger fails just then",
    ),
    "L11": Threat(
        "double commits, unknown ids, numbers out of range",
        (
            f"{LEDGER}::test_a_ticket_burns_once_and_commits_once",
            f"{LEDGER}::test_only_unburnt_refundable_tickets_return_and_only_once",
            f"{LEDGER}::test_counts_are_whole_and_positive",
            f"{INTEGRITY}::test_no_line_returns_what_is_not_refundable_or_settles_more_than_was_reserved",
            "unit_tests/privacy/accounting/test_huge_numbers.py::test_a_count_that_no_database_keeps_is_refused",
            "unit_tests/privacy/accounting/test_huge_numbers.py::test_an_amount_that_is_no_float_is_refused",
        ),
    ),
    "L12": Threat(
        "nested components, one component in two ledgers",
        (
            f"{PRACTICE}::test_components_inside_one_another_are_charged_once_each",
            f"{PRACTICE}::test_one_data_set_is_bound_to_one_ledger_for_good",
            f"{STORES}::test_transactions_do_not_nest",
        ),
    ),
    "L13": Threat("fork, pickle, copy", ("faults: L13", f"{STORES}::test_it_is_not_copied_and_not_pickled")),
    "L14": Threat("a network file system", ("faults: L14", f"{SQLITE}::test_a_network_file_system_is_refused")),
    "L15": Threat(
        "sums that drift",
        (
            f"{LEDGER}::test_ten_tenths_are_one",
            f"{LEDGER}::test_no_sequence_of_shares_exceeds_either_limit",
            "unit_tests/privacy/accounting/test_accounting_laws.py::test_an_independent_computation_agrees",
            "unit_tests/cli/test_cli_ledger.py::test_verify_recomputes_everything_and_says_what",
        ),
    ),
    # --- provider -----------------------------------------------------------------------------------------------------
    "P1": Threat(
        "429, 500 and timeouts of some rows",
        (
            f"{ROWS}::test_is_asked_again_and_then_abstains",
            f"{ROWS}::test_is_what_it_was_when_the_provider_comes_back",
            f"{ROWS}::test_a_row_that_is_not_answered_in_time_abstains",
            f"{ROOMS}::test_one_record_that_the_provider_refuses_is_seen_nowhere",
        ),
    ),
    "P2": Threat(
        "an outage",
        (
            f"{ROOMS}::test_a_public_outage_aborts_on_every_data_set_alike",
            "unit_tests/voting/test_voting.py::test_an_outage_costs_nothing",
            "unit_tests/generation/test_synthesis.py::test_an_outage_keeps_the_charge_and_what_was_released_and_resumes",
            f"{FREE}::test_where_every_row_fails_a_release_is_made_all_the_same",
        ),
    ),
    "P3": Threat(
        "a content filter that one record sets off",
        (
            f"{ROOMS}::test_one_record_that_the_provider_refuses_is_seen_nowhere",
            f"{ROOMS}::test_how_many_records_are_refused_is_seen_nowhere",
            f"{ROOMS}::test_the_comparison_sees_a_room_that_lets_a_failed_row_through",
            f"{FREE}::test_errors_of_neighbouring_data_sets_are_equal",
            f"{NEIGHBOURS}::test_a_replaced_record_is_seen_nowhere_but_under_the_noise",
        ),
    ),
    "P4": Threat(
        "errors that echo the prompt, pages, huge bodies",
        (
            f"{ROWS}::test_abstains_at_once_where_asking_again_helps_nobody",
            f"{ROWS}::test_a_row_whose_answer_is_ten_megabytes_of_nothing_abstains",
            f"{ROWS}::test_raises_without_what_came_back",
            "unit_tests/test_canary.py::test_a_failing_provider_tells_nobody_which_record",
        ),
    ),
    "P5": Threat(
        "log-probabilities of any kind",
        (
            "unit_tests/backends/langchain/test_logprobs.py::test_any_payload_becomes_a_valid_row",
            "unit_tests/backends/langchain/test_logprobs.py::test_ten_thousand_mixed_payloads_become_valid_rows",
            "unit_tests/backends/langchain/test_payloads.py::test_more_entries_than_the_largest_vocabulary_become_a_row",
            "unit_tests/backends/langchain/test_logprobs.py::test_reported_bytes_win_over_the_text",
        ),
    ),
    "P6": Threat(
        "answers outside the labels",
        (
            "unit_tests/backends/langchain/test_answers.py::test_anything_else_names_nothing",
            "unit_tests/backends/langchain/test_texts.py::test_are_none_where_the_answer_was_filtered_or_calls_a_tool",
            "unit_tests/backends/langchain/test_answers.py::test_ten_thousand_mixed_answers_do_not_raise",
        ),
    ),
    "P7": Threat(
        "answers that take long for some prompts",
        (f"{ROOMS}::test_one_record_that_takes_too_long_is_seen_nowhere_but_in_the_time",),
        limit="Wall-clock time and memory are not hidden",
    ),
    "P8": Threat(
        "usage, ids and headers of answers",
        (MATRIX, f"{ROOMS}::test_what_comes_with_an_answer_is_in_nothing_that_leaves"),
    ),
    "P9": Threat(
        "a model that changes or draws at random",
        (
            f"{ROOMS}::test_what_comes_with_an_answer_is_in_nothing_that_leaves",
            f"{VOTING}::test_a_row_that_breaks_votes_for_nothing",
        ),
    ),
    "P10": Threat(
        "rows that are coupled",
        (
            "unit_tests/backends/hf/test_huggingface_rows.py::test_replacing_one_prompt_leaves_all_other_rows_bit_identical",
            "unit_tests/backends/rows/test_label_rows_engines.py::test_a_row_does_not_know_how_many_stand_beside_it",
            "unit_tests/backends/test_calls.py::test_is_kept_by_a_failing_row",
            f"{RECORDS}::test_a_record_of_ten_megabytes_is_cut_at_the_public_cap_and_refused_nowhere",
        ),
        limit="A provider that couples rows",
    ),
    # --- content ------------------------------------------------------------------------------------------------------
    "C1": Threat(
        "braces, templates, control characters, lone surrogates",
        (
            f"{RECORDS}::test_text_of_any_kind_reaches_the_model_letter_by_letter",
            f"{RECORDS}::test_a_hostile_record_is_one_row_of_generation_as_it_is",
            f"{VOTING}::test_a_hostile_record_is_shown_to_the_model_as_it_is",
            "unit_tests/backends/hf/test_prompts.py::test_braces_in_demonstrations_and_queries_arrive_byte_for_byte",
            "unit_tests/privacy/data/test_units.py::test_lone_surrogates_become_text_that_any_engine_can_encode",
        ),
    ),
    "C2": Threat(
        "a record that gives orders",
        (
            f"{VOTING}::test_an_obeyed_injection_is_one_vote",
            f"{VOTING}::test_a_hostile_record_moves_its_own_row_alone",
            f"{LABELLING}::test_a_hostile_record_moves_its_own_row_alone",
            f"{FREE}::test_a_record_moves_its_own_row_and_no_other",
            f"{TRAINING}::test_a_hostile_record_moves_its_own_row_alone_and_by_no_more_than_the_clip",
        ),
    ),
    "C3": Threat(
        "what LangChain would load as an object",
        (
            f"{RECORDS}::test_what_langchain_would_load_is_text_wherever_it_stands",
            f"{RECORDS}::test_a_released_demonstration_that_looks_like_an_object_is_text",
            "unit_tests/backends/hf/test_prompts.py::test_a_stranger_s_file_is_refused_or_inert",
        ),
    ),
    "C4": Threat(
        "10 MB records, a million records, 100,000 labels",
        (
            f"{RECORDS}::test_a_record_of_ten_megabytes_is_cut_at_the_public_cap_and_refused_nowhere",
            f"{RECORDS}::test_a_hundred_thousand_records_make_no_more_calls_than_ten",
            f"{RECORDS}::test_as_many_labels_as_records_are_read_in_time_that_grows_with_both",
            "unit_tests/privacy/data/test_units.py::test_text_is_cut_at_the_public_cap_and_never_refused",
        ),
    ),
    "C5": Threat(
        "no records, too few, all alike, one user's",
        (
            f"{ROOMS}::test_how_many_records_are_refused_is_seen_nowhere",
            "unit_tests/generation/test_synthesis.py::test_any_records_give_the_same_plan_and_the_same_type_of_result",
            "unit_tests/generation/test_synthesis.py::test_one_user_owning_everything_is_one_row",
            f"{NEIGHBOURS}::test_added_and_removed_records_are_seen_nowhere_but_under_the_noise",
            f"{NEIGHBOURS}::test_who_owns_the_records_is_seen_nowhere_but_under_the_noise",
        ),
    ),
    "C6": Threat(
        "adversarial queries",
        (
            f"{VOTING}::test_a_hostile_query_is_passed_on_as_it_is_and_costs_one_ticket",
            f"{VOTING}::test_a_query_under_which_every_private_prompt_breaks_is_answered_by_noise",
            "statistical_tests/test_voting_audit.py::test_no_answer_gives_away_more_than_it_is_charged_for",
        ),
    ),
    "C7": Threat(
        "a record that is none",
        ("unit_tests/privacy/test_examples.py::test_a_record_fault_hides_index_value_and_cause",),
    ),
    # --- mechanism ----------------------------------------------------------------------------------------------------
    "M1": Threat(
        "a partition that shifts",
        (
            "unit_tests/privacy/mechanisms/test_sampling.py::test_removing_one_unit_changes_at_most_the_slot_it_was_in",
            "unit_tests/privacy/mechanisms/test_sampling.py::test_a_partition_moves_one_slot_at_most_whatever_the_order_of_the_units",
            "unit_tests/privacy/mechanisms/test_sampling.py::test_a_partition_that_shifts_its_neighbours_turns_the_coupling_test_red",
        ),
    ),
    "M2": Threat(
        "a record or user in two rows",
        (
            "unit_tests/release/test_curator.py::test_one_record_moves_one_slot",
            "unit_tests/generation/test_deals.py::test_every_unit_stands_in_one_row_of_one_demonstration_of_its_label",
            f"{PRACTICE}::test_units_are_users_in_every_process_of_a_ledger",
        ),
    ),
    "M3": Threat(
        "noise of a wrong scale",
        (
            "statistical_tests/test_noise.py::test_released_noise_has_the_declared_scale_on_every_coordinate",
            "statistical_tests/test_noise.py::test_a_forgotten_sqrt2_is_rejected",
            "statistical_tests/test_voting_audit.py::test_no_answer_gives_away_more_than_it_is_charged_for",
        ),
    ),
    "M4": Threat(
        "no sample, or another rate",
        (
            "statistical_tests/test_voting_audit.py::test_every_query_has_a_sample_of_its_own_at_the_charged_rate",
            "statistical_tests/test_pate_law.py::test_every_input_has_a_sample_of_its_own_at_the_charged_rate",
            f"{RATES}::test_poisson_units_join_at_the_declared_rate_equally_and_independently",
        ),
    ),
    "M5": Threat(
        "noise that is reused, seeded or copied",
        (
            "unit_tests/privacy/mechanisms/test_randomness.py::test_forked_workers_share_no_coins",
            "unit_tests/privacy/mechanisms/test_randomness.py::test_copies_share_no_coins",
            "unit_tests/privacy/mechanisms/test_randomness.py::test_reseeding_the_global_generators_repeats_nothing",
            "statistical_tests/test_voting_audit.py::test_labels_of_one_query_are_drawn_anew_each_time",
        ),
    ),
    "M6": Threat(
        "noise that is redrawn, partial or late",
        (
            "unit_tests/privacy/mechanisms/test_randomness.py::test_every_draw_pays_eight_fresh_bytes_a_coordinate",
            "statistical_tests/test_noise.py::test_noise_on_one_coordinate_shared_or_reused_is_rejected",
            "statistical_tests/test_noise.py::test_frequencies_of_a_noisy_maximum_are_its_closed_form",
        ),
    ),
    "M7": Threat(
        "a threshold, an abstention or a retry that is not charged",
        (
            "statistical_tests/test_pate_law.py::test_tickets_that_do_not_add_up_are_caught",
            "contracts/front_room.py::test_every_door_reserves_before_it_reads_and_charges_what_it_releases",
        ),
    ),
    "M8": Threat(
        "parameters tuned on the data",
        ("unit_tests/generation/test_planning.py",),
        limit="parameters chosen by looking at the records",
    ),
    "M9": Threat(
        "doors that differ",
        (
            "contracts/front_room.py::test_every_door_reserves_before_it_reads_and_charges_what_it_releases",
            "contracts/front_room.py::test_a_batch_gets_the_tickets_there_are_and_keeps_what_it_paid_for",
            f"{RUNNABLES}::test_a_retry_does_not_follow_our_errors_unasked",
            f"{RUNNABLES}::test_no_fallback_stands_in_for_our_errors_unasked",
        ),
        limit="A fallback or retry of an *enclosing* chain",
    ),
    "M10": Threat(
        "training: samples, clipping, coins",
        (
            "statistical_tests/test_training_sampler.py::test_every_step_draws_each_unit_by_a_coin_of_its_own",
            f"{TRAINING}::test_a_user_of_many_records_moves_the_sum_by_no_more_than_one_clip",
            f"{TRAINING}::test_records_that_are_clipped_one_by_one_would_be_seen",
            "statistical_tests/test_training_audit.py::test_one_run_gives_away_no_more_than_it_is_charged",
        ),
    ),
    "M11": Threat(
        "an answer given again",
        (
            "unit_tests/voting/test_voting.py::test_who_asks_again_is_told_again_for_free",
            "unit_tests/runs/test_tenants.py::test_memory_is_bounded_in_tenants_too",
            "unit_tests/runs/test_tenants.py::test_nobody_is_told_what_another_was_told",
            "statistical_tests/test_voting_audit.py::test_the_memo_tells_nobody_what_another_tenant_was_told",
            f"{MEMO}::test_nothing_is_told_to_another_tenant",
            f"{MEMO}::test_nothing_is_told_of_another_plan",
            f"{MEMO}::test_nothing_is_told_of_another_data_set_or_ledger",
            f"{MEMO}::test_a_kill_loses_at_most_the_ticket_and_no_answer_that_stands_is_paid_for_again",
            "unit_tests/runs/test_memo_planted.py::test_a_planted_bug_is_found",
        ),
        limit="Memos",
    ),
    "M12": Threat(
        "labels, values, topics and sizes read off the records",
        (
            "unit_tests/privacy/extensions/test_unit_keywords.py::test_move_the_counts_by_no_more_than_their_sensitivities",
            "unit_tests/privacy/extensions/test_unit_keywords.py::test_is_the_same_whoever_else_is_there",
            "unit_tests/privacy/extensions/test_topic_examples.py::test_topics_are_named_once_and_the_same_declaration_is_the_same_object",
            "unit_tests/privacy/extensions/test_topic_examples.py::test_the_units_stay_on_their_ledger_and_the_ledger_keeps_the_topics",
            "unit_tests/documents/test_documents.py::test_one_share_is_set_aside_before_anything_is_read",
            "unit_tests/documents/test_documents.py::test_neighbours_differ_in_nothing_but_what_is_released",
            "unit_tests/audit/test_documenting.py::test_a_planted_mistake_is_found_in_the_part_it_is_in",
            "unit_tests/privacy/accounting/test_value_counts.py::test_lets_the_value_of_one_unit_through_as_often_as_is_charged_and_no_more",
            "unit_tests/privacy/accounting/test_value_counts.py::test_moves_the_counts_by_no_more_than_its_sensitivity",
            "unit_tests/privacy/accounting/test_value_counts.py::test_does_not_tell_in_which_order_records_came",
            "unit_tests/privacy/extensions/test_word_release.py::test_move_the_sums_by_no_more_than_the_sensitivity_and_no_other_unit",
            "unit_tests/privacy/extensions/test_word_release.py::test_lets_items_of_one_unit_through_as_often_as_is_charged_and_no_more",
            "unit_tests/audit/test_finding_words.py::test_a_planted_mistake_is_found_in_the_part_it_is_in",
            "unit_tests/discovery/test_words.py::test_nothing_is_read_before_the_ticket_stands_in_the_ledger",
            "unit_tests/privacy/test_redeclared.py::test_every_declaration_is_bound_to_the_one_ledger_and_to_no_other",
            "unit_tests/discovery/test_discovery.py::test_neighbours_differ_in_nothing_but_the_noisy_counts",
            "unit_tests/audit/test_counting.py::test_a_value_of_one_unit_that_is_found_too_often_is_a_violation",
            "unit_tests/discovery/test_discovery.py::test_nothing_is_read_before_the_ticket_stands_in_the_ledger",
            "unit_tests/discovery/test_discovery.py::test_nothing_private_is_shown_and_nothing_is_copied",
        ),
        limit="distinct values",
    ),
    "M13": Threat(
        "records that vote on a model's texts: seen by the model, more than one vote, a histogram that is exact or free",
        (
            f"{EVOLUTION}::test_the_model_is_asked_public_and_released_texts_alone_and_the_embeddings_see_the_records",
            f"{EVOLUTION}::test_a_unit_of_any_content_moves_a_histogram_by_its_sensitivity_at_most",
            f"{EVOLUTION}::test_the_released_histogram_has_the_noise_that_is_priced",
            f"{EVOLUTION}::test_embeddings_that_fail_or_stop_on_a_record_show_nothing",
            "unit_tests/evolution/test_evolution.py::test_nothing_is_embedded_and_nothing_charged_before_the_first_ticket_burns",
            "unit_tests/evolution/test_evolution.py::test_every_round_is_a_ticket_and_every_private_text_is_embedded_once",
            "unit_tests/evolution/test_evolution.py::test_whatever_the_records_are_the_same_path_is_walked",
            "unit_tests/evolution/test_evolution_checkpoint.py::test_a_killed_process_loses_the_one_round_that_it_had_reserved",
        ),
        limit="Private evolution shows every private text to the embeddings",
    ),
    "M14": Threat(
        "documents that pay for themselves: found by their rank, asked after they are exhausted, or their balance shown",
        (
            "unit_tests/privacy/extensions/test_participation.py::test_over_any_adaptive_run_a_unit_moves_no_more_than_its_participations",
            "unit_tests/privacy/extensions/test_participation.py::test_with_top_k_one_unit_moves_every_query_long_after_it_was_exhausted",
            f"{RETRIEVAL}::test_a_unit_changes_nothing_of_what_another_unit_does",
            f"{RETRIEVAL}::test_debits_come_before_the_model_is_asked_and_are_on_the_ledger",
            f"{RETRIEVAL}::test_debits_stay_whatever_fails_after_them",
            f"{RETRIEVAL}::test_nothing_that_is_shown_tells_a_balance_or_who_took_part",
            f"{RETRIEVAL}::test_an_older_copy_of_the_file_lets_nobody_in",
            f"{RETRIEVAL}::test_processes_together_let_a_unit_in_as_often_as_declared",
            f"{RETRIEVAL}::test_a_kill_at_any_moment_gives_no_participation_back",
            "statistical_tests/test_retrieval_audit.py::test_top_k_instead_of_a_threshold_is_seen",
        ),
        limit="Votes of retrieved documents keep the direction of every document",
    ),
    # --- leaks: every channel is a line of the leak table ---------------------------------------------------------------
    "S1-S22": Threat(
        "whatever could overhear a private call",
        (
            MATRIX,
            "integration_tests/test_leak_matrix.py::test_every_entry_point_of_every_room_is_on_the_table",
            "unit_tests/backends/private_calls/test_quiet.py::test_the_debug_log_of_an_sdk_is_withheld",
            "unit_tests/test_private_frames.py::test_ctrl_c_leaves_nothing_private_in_our_frames",
        ),
    ),
}
