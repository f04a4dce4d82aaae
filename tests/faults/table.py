"""The 55 faults that kit is held to, each with the tests that show what becomes of it.

`tests` are below tests/; `gpu` are those that only a GPU can answer, and `tests` of the same row what stands in for
them on a CPU. `remark` says what is not tested, and why it cannot happen here.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    number: int
    fault: str
    injected: str
    expected: str
    tests: tuple[str, ...] = ()
    remark: str = ""
    gpu: tuple[str, ...] = ()


def of(file, *names):
    return tuple(f"{file}::test_{name}" for name in names)


TRIAL = "faults/test_trial_faults.py"
RANK = "faults/test_rank_faults.py"
RECORD = "faults/test_record_faults.py"
PANEL = "faults/test_panel_faults.py"
NAMES = "faults/test_name_faults.py"
CUDA = "gpu/test_faults_cuda.py"
STORE = "data/test_store_faults.py"
CAUSES = of(TRIAL, "a_fault_fails_the_trial_with_its_cause_and_keeps_the_steps_before")

WORKER_AND_TRIAL = (
    Fault(
        1, "a rank raises", "a module that raises at a step",
        "FAILED/error with the user's line and traceback; siblings end at once; other trials go on",
        CAUSES + of(TRIAL, "the_siblings_of_a_failed_rank_do_not_wait_for_it",
                    "the_error_shown_holds_the_users_traceback_and_the_log")
        + of("trial/test_supervisor.py", "two_trials_run_at_the_same_time_and_end_apart",
             "failed_trials_keep_their_supervisor"),
    ),
    Fault(
        2, "a rank is killed", "SIGKILL, SIGSEGV, os._exit(0)",
        "FAILED/killed with the signal's name; exit 0 without a word is no success; the steps before are kept",
        CAUSES + of("trial/test_verdict.py", "exit_code_zero_alone_is_no_success")
        + of("trial/test_worker.py", "leaving_by_sys_exit_is_a_failure"),
    ),
    Fault(
        3, "the host runs out of memory", "an allocation that cannot be had; a kill with the system's counter raised",
        "FAILED/host_oom when the system counted it, with what the rank used; else killed",
        CAUSES + of("trial/test_verdict.py", "a_kill_from_outside_is_host_memory_only_when_the_system_counted_it")
        + of("trial/test_failure.py", "each_error_has_its_cause"),
        "A real limit of a control group needs rights over the machine that a test must not ask for; the counters that "
        "it would raise are what the verdict is given.",
    ),
    Fault(
        4, "the device runs out of memory", "an allocation above what is free; torch.OutOfMemoryError on a CPU",
        "FAILED/device_oom with what helps; predicted and measured in the row; memory given back; the next trial runs",
        CAUSES + of("studies/test_batch_search.py", "a_plain_trial_that_runs_out_of_memory_says_what_helps",
                    "a_trial_backs_off_until_it_fits_and_starts_there_the_next_time")
        + of("train/test_device_limit.py", "a_step_that_holds_more_fails_in_its_middle_as_on_a_gpu")
        + of("records/test_results.py", "memory_stands_as_predicted_measured_and_ratio"),
        "What the driver has back is asked of a GPU.",
        gpu=of(CUDA, "memory_of_a_trial_that_ran_out_is_given_back_and_the_next_one_runs"),
    ),
    Fault(
        5, "out of memory on one rank of two", "rank 1 raises while rank 0 waits for its gradients",
        "the others are killed at once and the first cause is told",
        CAUSES + of(TRIAL, "the_siblings_of_a_failed_rank_do_not_wait_for_it")
        + of("trial/test_verdict.py", "the_first_failure_in_time_is_reported",
             "a_lost_peer_is_never_the_root_even_when_it_spoke_first"),
        "That it takes less than a time is asserted by a stall limit of ten minutes which is not reached.",
    ),
    Fault(
        6, "the loss is nan or inf", "a module that returns it at a step",
        "FAILED/diverged at that step with the last finite loss; the row keeps it, charts leave it out, JSON is valid",
        CAUSES + of(RANK, "a_loss_that_is_no_number_stands_in_the_row_and_every_file_of_it_is_json")
        + of(TRIAL, "the_fault_table_is_json_in_every_event_file")
        + of("charts/test_trial_charts.py", "numbers_that_are_not_finite_are_left_out"),
    ),
    Fault(
        7, "a step, a collective or the data hangs", "sleep, a message that never comes, a source that blocks",
        "FAILED/stalled after stall_seconds with the line it hangs at and the stacks in the log; the group is killed",
        of(TRIAL, "a_rank_that_hangs_is_killed_and_its_stack_is_told", "data_that_hangs_is_told_by_its_line")
        + of("faults/test_prediction_faults.py", "a_step_that_hangs_is_broken_off_and_the_rest_is_answered",
             "a_process_that_cannot_be_broken_off_is_killed_and_its_place_is_told"),
    ),
    Fault(
        8, "the wall-clock limit", "a long trial",
        "FAILED/timeout, ended by force, with the steps so far",
        of(TRIAL, "a_trial_that_takes_too_long_is_ended"),
        "There is no grace after a timeout: events are whole after every step, so SIGKILL loses nothing that SIGTERM "
        "would save.",
    ),
    Fault(
        9, "a rank ignores signals", "handlers that ignore every signal there is",
        "killed when the grace is over, by the one signal that cannot be ignored",
        of(RANK, "a_rank_that_ignores_every_signal_is_killed_when_the_grace_is_over")
        + of(TRIAL, "a_hung_rank_is_killed_when_the_grace_after_stop_is_over"),
    ),
    Fault(
        10, "the user stops", "stop(), kill(), an interrupt of the cell, a cancelled await",
        "STOPPED, what was measured is kept, one line in the cell and no SystemExit",
        of(TRIAL, "stop_ends_every_rank_after_the_same_step", "kill_ends_a_trial_at_once",
           "an_interrupt_while_waiting_stops_the_trial_and_keeps_its_steps", "cancelling_an_awaited_trial_stops_it",
           "interrupting_a_notebook_cell_stops_the_trial_it_waits_for_and_leaves_one_line")
        + of("widgets/test_panel.py", "a_second_click_stops_and_keeps_what_was_measured"),
    ),
    Fault(
        11, "the kernel restarts, ends or is killed", "a real kernel with loader processes; also the supervisor",
        "no process survives; opened again the trial is LOST with all events up to then; device memory is free",
        of(TRIAL, "nothing_survives_a_notebook_kernel",
           "nothing_survives_a_kernel_that_is_killed_and_the_trial_is_lost",
           "nothing_survives_a_supervisor_that_is_killed_and_the_next_trial_gets_a_new_one",
           "loader_processes_die_with_a_rank_that_is_killed")
        + of("faults/test_prediction_faults.py", "nothing_survives_a_kernel_that_is_killed")
        + of("trial/test_supervisor.py", "a_supervisor_ends_when_its_parent_is_not_who_it_was_told")
        + of("faults/test_nothing_left.py", "a_trial_whose_kernel_is_killed",
             "only_folders_of_this_user_whose_owner_is_gone_are_swept"),
        "That device memory is free is asked of a GPU; on a CPU it goes with the processes.",
        gpu=of(CUDA, "memory_of_a_trial_is_given_back_when_its_kernel_is_killed"),
    ),
    Fault(
        12, "an event file is torn, damaged, of another version or empty", "edited files",
        "a torn tail is dropped, a damaged line is named, unknown kinds are kept, empty files are WAITING",
        of("test_events.py", "a_torn_last_line_waits_for_its_rest",
           "damage_in_the_middle_is_named_by_file_and_line")
        + of("trial/test_trial.py", "a_torn_last_line_is_dropped_and_a_damaged_middle_one_is_told")
        + of("trial/test_verdict.py", "a_torn_or_damaged_event_file_does_not_prevent_a_verdict")
        + of(RECORD, "an_event_of_a_kind_that_is_not_known_is_kept_and_disturbs_nothing",
             "a_run_whose_event_files_are_empty_is_waiting_while_its_supervisor_lives")
        + of("faults/test_damaged_runs.py", "a_damaged_file_is_a_row_that_says_so_or_a_named_error",
             "any_line_of_an_event_file_is_an_event_or_a_named_error"),
    ),
    Fault(
        13, "events cannot be written", "a file-size limit of nothing in the middle of a trial",
        "FAILED/error that names the directory and the disk; the steps before are whole; the kernel is unaffected",
        CAUSES + of("faults/test_full_disk.py", "whichever_write_fails_leaves_no_run_behind",
                    "a_real_disk_of_a_few_pages_is_never_left_with_half_a_run"),
    ),
    Fault(
        14, "many append at once", "eight processes of 500 events each",
        "every line parses and none is missing",
        of("test_events.py", "many_processes_append_whole_lines_to_one_file"),
    ),
    Fault(
        15, "a flood on stdout, bytes that are no text, progress bars", "noisy modules",
        "logs are capped, nobody blocks on a pipe, errors are told all the same",
        of(TRIAL, "a_noisy_module_does_not_fill_the_disk")
        + of(RANK, "bytes_that_are_no_text_and_progress_bars_in_a_log_hide_no_error",
             "a_crash_after_bytes_that_are_no_text_is_still_told_by_its_line"),
    ),
    Fault(
        16, "a port in use, a rendezvous left behind, devices hidden or wrong", "the environment",
        "a fresh port for each trial; what is not there is refused before the start",
        of("trial/test_supervisor.py", "a_rendezvous_left_in_the_environment_does_not_confuse_the_ranks",
           "an_allocation_of_slurm_around_the_notebook_does_not_confuse_the_ranks")
        + of(RANK, "trials_beside_each_other_meet_at_ports_of_their_own")
        + of("trial/test_rendezvous.py", "every_process_of_a_trial_listens_on_loopback_only",
             "the_port_of_a_trial_is_taken_before_its_ranks_start_and_free_when_it_has_ended")
        + of("test_machine.py", "hidden_gpus_are_the_reason_for_the_cpu",
             "only_visible_gpus_are_offered_in_the_order_named", "what_is_not_there_is_refused_with_the_way_out"),
    ),
    Fault(
        17, "a module that cannot be imported or sent", "import paths, locks, classes of a script, hostile __reduce__",
        "refused at submit with what holds it; notebook classes travel; what cannot be made again fails by its error",
        of("trial/test_trial.py", "what_cannot_run_is_refused_without_a_run_directory",
           "classes_of_a_script_travel_by_value_and_the_kernel_needs_no_torch_for_paths")
        + of("trial/test_payload.py", "an_object_that_cannot_be_sent_is_named",
             "a_captured_variable_that_cannot_be_sent_is_named", "a_factory_that_needs_arguments_is_refused")
        + of(RANK, "an_object_that_cannot_be_made_again_in_a_rank_fails_with_its_own_error"),
    ),
    Fault(
        18, "a process id is reused, the clock jumps, the machine slept", "altered records",
        "alive means the same id and start time; times that go back revive nothing; no stranger is signalled",
        of("trial/test_trial.py", "a_process_that_reused_the_id_is_not_taken_for_the_supervisor",
           "a_run_from_before_a_restart_of_the_machine_is_lost")
        + of("test_claims.py", "an_id_that_another_process_has_by_now_holds_nothing",
             "a_claim_of_another_boot_or_machine_does_not_count")
        + of(RECORD, "a_clock_that_is_set_back_neither_mixes_steps_nor_revives_a_trial",
             "lines_of_one_file_keep_their_order_whatever_their_times_say"),
        "Ids on file are looked at and never signalled: a stop goes by a file, and a supervisor signals only its own "
        "children before it reaps them. Deadlines count by a clock that cannot be set and stands still in sleep.",
    ),
    Fault(
        19, "trials are repeated", "many tiny trials",
        "descriptors, threads and children stay as they were; no CUDA context in the kernel",
        of("trial/test_supervisor.py", "twenty_trials_leave_descriptors_threads_and_children_as_they_were")
        + of("trial/test_worker.py", "a_rank_inherits_nothing_of_other_trials")
        + of("faults/test_nothing_left.py", "a_complete_trial", "a_trial_that_is_ended")
        + of("trial/test_trial.py", "classes_of_a_script_travel_by_value_and_the_kernel_needs_no_torch_for_paths")
        + of("test_machine.py", "looking_needs_neither_torch_nor_an_open_device"),
        "That no context of CUDA stays is asked of a GPU; on a CPU the kernel does not even import torch.",
        gpu=of(CUDA, "fifty_trials_leave_the_kernel_without_a_context_and_the_memory_as_it_was"),
    ),
    Fault(
        20, "a prediction above what is allowed", "targets that are too small",
        "refused before any process, saying by how much",
        of("studies/test_recommend.py", "a_refusal_says_by_how_much_and_gives_no_config",
           "what_is_no_target_is_refused_before_anything_runs")
        + of("studies/test_batch_search.py", "a_cpu_without_a_limit_is_refused_before_any_process")
        + of("data/rows/test_row_data.py", "what_does_not_fit_the_memory_of_the_loader_is_refused")
        + of("memory/test_prediction_beside.py", "what_goes_wrong_after_two_steps_leaves_prediction_and_measurement"),
        "kit.fit refuses nothing for a prediction, and so has no override: it predicts beside the trial, which ends "
        "by itself and costs one step when the prediction was right.",
    ),
)  # fmt: skip

DATA = (
    Fault(
        21, "a damaged chunk", "flipped bits in bodies and indexes, cut off, empty, another's bytes",
        "CorruptChunkError with array, chunk and place, or the very same values; never wrong ones",
        of("data/test_engine.py", "a_flipped_bit_is_an_error_or_changes_nothing", "a_truncated_object_is_an_error",
           "an_object_of_another_size_is_an_error_though_its_checksum_holds",
           "one_bad_batch_does_not_spoil_those_before_it")
        + of("data/test_build.py", "a_flipped_bit_in_any_object_is_found_and_never_read_as_data")
        + of("data/test_http_client.py", "a_truncated_object_on_the_store_is_named_as_damage")
        + of("data/test_patches.py", "damage_reaches_the_consumer_under_its_name"),
    ),
    Fault(
        22, "a missing chunk, shard or inner chunk", "deleted objects; shards without an inner chunk; 404",
        "MissingChunkError in a store that kit built; in another one filled by its rule and counted",
        of("data/test_engine.py", "a_missing_object_is_an_error_in_a_store_that_kit_built",
           "an_inner_chunk_that_its_shard_does_not_hold_is_an_error_in_a_store_that_kit_built",
           "a_store_that_kit_did_not_build_may_leave_chunks_out_and_they_are_counted")
        + of("data/test_absent_chunks.py", "absent_chunks_read_as_zarr_reads_them_and_are_said",
             "strict_makes_an_absent_chunk_an_error_that_names_it")
        + of("data/test_retries.py", "a_chunk_that_is_not_found_is_an_error_and_not_zeros")
        + of("data/test_build.py", "a_missing_or_short_object_is_named_with_its_array"),
    ),
    Fault(
        23, "chunks of nothing but zeros", "zeros, and missing values",
        "they are data: written, and read without a complaint",
        of("data/test_engine.py", "zeros_are_data")
        + of("data/test_build.py", "missing_chunks_are_written_so_that_an_absent_object_is_always_an_error",
             "every_inner_chunk_of_an_all_missing_shard_is_there"),
    ),
    Fault(
        24, "damaged or stale metadata", "edited zarr.json: type, shape, format, codecs, stale consolidation",
        "a StoreError that names the place; in a store that kit built anything but what was published",
        of(STORE, "metadata_of_others_that_makes_no_sense_is_a_store_error_that_names_the_place",
           "consolidated_metadata_that_is_stale_is_found_by_the_manifest")
        + of("data/test_dataset.py", "metadata_that_is_not_what_was_published_is_refused",
             "a_fill_value_that_is_no_number_is_refused"),
    ),
    Fault(
        25, "bursts of 503, 429, 500", "scripted answers of a server",
        "tried again with growing, drawn pauses until it works; exactly counted",
        of("data/test_retries.py", "what_passes_is_tried_again_and_counted",
           "pauses_grow_are_drawn_from_zero_and_end_before_the_deadline",
           "batches_are_whole_through_a_bad_day_and_what_it_cost_is_counted"),
    ),
    Fault(
        26, "503 for ever, 403, 404, 401", "scripted answers of a server",
        "given up at the deadline with the last words; an answer at once; a token that ran out is renewed",
        of("data/test_retries.py", "a_store_that_never_recovers_is_given_up_at_the_deadline_with_its_last_words",
           "an_answer_comes_back_at_once", "an_error_is_judged_by_its_status_or_by_the_one_behind_it")
        + of("data/test_http_client.py", "a_refusal_is_an_error_without_a_secret",
             "a_token_that_ran_out_is_renewed_before_the_next_request", "a_401_comes_back_at_once"),
    ),
    Fault(
        27, "timeouts, drips, resets, short bodies", "a server on loopback that does so",
        "retried as a whole range within a deadline; a short buffer is never taken",
        of("data/test_retries.py", "what_passes_is_tried_again_and_counted")
        + of(STORE, "a_body_that_drips_is_whole_or_given_up_at_the_deadline")
        + of("data/test_engine.py", "a_request_without_an_answer_is_given_up",
             "a_store_that_never_answers_is_given_up_when_it_is_opened",
             "a_folder_behind_http_without_ranges_is_an_error_and_never_wrong")
        + of("data/test_http_client.py", "an_answer_that_is_not_the_range_asked_for_is_an_error"),
    ),
    Fault(
        28, "no name server, no network, no bucket", "a resolver that knows nothing, a closed port",
        "an error after one short attempt that names host and network; with a full cache the run goes on with a word",
        of(STORE, "a_host_that_no_name_server_knows_is_refused_at_once")
        + of("data/test_stores.py", "a_host_that_does_not_answer_is_refused_after_one_short_attempt")
        + of("data/test_servers.py", "a_bucket_that_is_not_there_is_an_error_within_seconds")
        + of("data/test_second_run.py", "without_a_network_a_full_cache_is_enough",
             "without_a_network_what_the_cache_lacks_is_an_error_that_names_the_way_out"),
        "No other dataset is suggested: which one would do is not known.",
    ),
    Fault(
        29, "an interrupted build is resumed", "SIGKILL before and after every write; an interrupt",
        "the bytes of an unbroken build, nothing finished is written again, until then refused with how far it is",
        of("data/test_build.py", "a_builder_killed_at_every_write_resumes_to_the_same_bytes",
           "an_interrupt_leaves_a_store_that_says_how_far_it_got_and_can_be_finished")
        + of("data/test_schedulers.py", "a_builder_killed_with_its_workers_is_finished_to_the_same_bytes"),
    ),
    Fault(
        30, "a build is resumed with another config", "other arguments, compression, source",
        "refused with the fields that differ",
        of("data/test_build.py", "another_build_in_the_same_place_is_refused_with_the_difference",
           "a_source_that_gives_other_values_than_before_is_refused"),
    ),
    Fault(
        31, "a source raises or gives something else", "errors, shapes, types; too few; nan",
        "BuildError with the region, nothing is published; nan is data and left out of the statistics",
        of("data/test_build.py", "a_source_that_fails_publishes_nothing_and_names_the_region",
           "the_manifest_holds_mean_and_deviation_of_the_decoded_valid_values")
        + of("data/test_schedulers.py", "a_source_that_fails_on_a_worker_is_named_as_in_this_process"),
    ),
    Fault(
        32, "two write one store", "two processes at one moment; holders that are lost",
        "the second is told who the first is; no kill leaves a store locked",
        of("data/test_lock.py", "the_second_writer_is_told_who_the_first_is",
           "of_two_processes_that_race_for_a_store_exactly_one_wins_every_time",
           "a_killed_holder_on_a_local_disk_is_no_obstacle",
           "a_lock_in_an_object_store_is_taken_over_when_nobody_renews_it"),
    ),
    Fault(
        33, "writers that are not aligned to shards", "random shapes, chunks and shards",
        "tasks tile the array exactly once; a shard that cuts chunks is refused",
        of("data/test_build.py", "tasks_tile_the_array_exactly_once",
           "a_plan_for_another_shape_and_a_shard_that_cuts_chunks_are_refused")
        + of("data/test_rechunk.py", "groups_tile_the_array_once_within_the_budget_and_read_what_is_promised"),
    ),
    Fault(
        34, "a reader beside a build or a rebuild", "readers while a process builds again and again",
        "a published version or a named error",
        of(STORE, "a_reader_beside_a_rebuild_gets_a_published_version_or_a_named_error")
        + of("data/test_build.py", "a_builder_killed_at_every_write_resumes_to_the_same_bytes")
        + of("data/test_disk_cache.py", "a_rebuilt_store_is_never_served_from_the_old_one"),
        "A reader that opened the store before `overwrite=True` and goes on after it reads the new chunks: only who "
        "rebuilds can ask for that, and says so.",
    ),
    Fault(
        35, "full disk, no rights, a file in the way, a folder that vanishes", "limits, folders of others, rmtree",
        "named with place, need and free; nothing partial under a final name",
        of("data/test_build.py", "a_disk_too_small_is_refused_with_need_and_free_before_anything_is_written",
           "a_disk_that_fills_up_names_the_store_and_leaves_it_resumable",
           "a_folder_without_write_permission_is_a_store_error")
        + of("data/test_stores.py", "a_folder_that_is_not_there_and_a_file_in_its_place_say_so")
        + of("data/rows/test_write_rows.py", "a_full_disk_is_refused_before_a_byte")
        + of("trial/test_paths.py", "a_folder_that_cannot_be_made_is_a_config_error_naming_the_field")
        + of("faults/test_full_disk.py", "whichever_write_fails_leaves_no_run_behind")
        + of("trial/test_trial.py", "a_removed_run_directory_ends_its_trial_and_no_other")
        + of(STORE, "a_folder_that_vanishes_under_a_reader_is_a_named_error"),
    ),
    Fault(
        36, "a damaged, foreign or full cache; who fills it is killed", "edited entries; four processes; SIGKILL",
        "a miss, never an error and never wrong bytes; never above its size",
        of("data/test_disk_cache.py", "a_damaged_entry_is_a_miss_and_is_filled_again",
           "processes_that_share_a_folder_and_are_killed_never_spoil_it",
           "any_history_gives_right_bytes_within_the_size", "a_disk_that_is_full_keeps_nothing_more_with_one_word",
           "what_a_killed_writer_left_half_written_is_cut_off_by_the_next",
           "a_folder_that_cannot_be_made_is_not_needed", "a_folder_that_is_only_read_gives_what_is_in_it")
        + of("data/tables/test_query_cache.py", "no_damage_to_the_file_is_ever_read_as_rows",
             "a_reader_is_not_disturbed_by_who_drops_the_result"),
    ),
    Fault(
        37, "a fork or a pickle with an open store", "fork, forkserver, pickle",
        "each process opens for itself; descriptions are small and hold no handle",
        of("data/test_engine.py", "a_forked_process_opens_the_store_for_itself",
           "an_engine_pickles_without_its_handles")
        + of("data/test_http_client.py", "a_process_forked_after_a_wire_was_used_reads_by_one_of_its_own")
        + of("data/test_dataset.py", "a_dataset_pickles_small_and_opens_again")
        + of("data/test_patches.py", "loader_processes_are_no_forks_of_the_process_that_opened_the_store"),
    ),
    Fault(
        38, "odd geometry", "no element, one, edges, no dimension, 2.5 billion elements, chunks above the budget",
        "exact coverage, or a refusal that says what is empty or too large",
        of(STORE, "edges_and_single_elements_are_read_exactly",
           "an_array_of_more_elements_than_an_int32_counts_is_read_at_its_end",
           "an_array_without_dimensions_is_no_channel",
           "a_source_of_no_elements_is_refused_before_anything_is_written")
        + of("data/test_engine.py", "values_are_those_of_xarray_for_any_layout")
        + of("data/test_dataset.py", "an_empty_selection_is_refused_before_anything_is_read")
        + of("data/test_schedulers.py", "any_source_layout_any_target_and_any_budget_give_the_same_bytes",
             "a_budget_too_small_for_one_shard_is_refused_with_arithmetic_before_any_byte")
        + of("chunks/test_layout.py", "a_trillion_elements_are_planned_without_listing_them"),
    ),
    Fault(
        39, "a loader process raises, dies or hangs", "data sets that do so",
        "FAILED/data with the error or the process; stalled with its line; no process is left",
        of(TRIAL, "an_error_in_a_loader_process_is_a_failure_of_the_data")
        + of(RANK, "a_loader_process_that_is_killed_is_a_failure_of_the_data",
             "a_loader_process_that_hangs_is_told_by_its_line_and_killed_with_its_rank")
        + of("trial/test_failure.py", "a_killed_loader_process_is_told_though_the_read_from_it_failed_first")
        + of("data/test_shared_memory.py", "a_trial_on_a_machine_of_little_shared_memory_is_refused_before_anything"),
    ),
)  # fmt: skip

CONFIG_AND_NAMES = (
    Fault(
        40, "a round trip", "random configs",
        "equal after YAML, with the same fingerprint in any order; 1e-3 stays a number",
        of("test_config.py", "a_config_survives_yaml_unchanged_with_and_without_comments",
           "the_fingerprint_ignores_the_order_of_keys_and_sees_every_change",
           "yaml_1_2_reads_numbers_and_words_as_written"),
    ),
    Fault(
        41, "invalid YAML", "random text, nesting, aliases, megabytes, tabs, NUL",
        "ConfigError with the place, and nothing else",
        of("test_config.py", "any_text_is_a_config_or_one_clear_error",
           "broken_yaml_is_refused_with_its_place")
        + of("test_config_bounds.py", "a_list_of_880_kilobytes_is_given_up_after_its_first_values",
             "of_very_many_problems_the_first_are_told_and_how_many_there_are"),
    ),
    Fault(
        42, "unknown, duplicate or wrong values", "a table of them",
        "ConfigError with path and suggestion; a bool is no number",
        of("test_config.py", "a_wrong_value_is_named_by_its_path_with_the_way_out",
           "broken_yaml_is_refused_with_its_place", "every_mistake_is_reported_at_once")
        + of("test_config_bounds.py", "no_field_takes_a_number_that_nothing_can_hold", "whole_numbers_fit_64_bits"),
    ),
    Fault(
        43, "tags that would run something", "!!python tags with a canary; a scan of the source",
        "refused and not run; no short cut stands in the source",
        of(NAMES, "a_tag_in_yaml_runs_nothing", "only_what_kit_itself_has_packed_is_unpickled")
        + of("test_layers.py", "the_source_never_takes_a_dangerous_short_cut"),
    ),
    Fault(
        44, "files that would run something when read", "canaries in .npy, .pt, pickled chunks, payloads",
        "refused and not run; snapshots are written and never loaded",
        of(STORE, "nothing_in_an_array_or_a_tensor_file_is_run", "a_chunk_that_would_unpickle_is_refused")
        + of("records/test_results.py", "a_pickle_in_a_run_directory_is_never_opened")
        + of("data/test_sources.py", "a_npy_file_of_objects_or_cut_short_is_refused")
        + of("trial/test_signing.py", "a_malicious_payload_is_not_unpickled",
             "a_module_that_the_config_names_is_not_imported")
        + of("studies/test_foreign_runs.py", "reading_a_foreign_run_runs_nothing_of_it"),
        "A checkpoint is copied as bytes and loaded by Lightning alone, of the run that saved it; kit has no "
        "`torch.load` but that of rows, with `weights_only=True`.",
    ),
    Fault(
        45, "names that lead elsewhere", "a table of names and random text; links",
        "one rule for names; every run lies in its folder; what a link leads to stays",
        of(NAMES, "a_name_that_is_no_plain_word_is_refused_under_its_path",
           "a_run_directory_lies_in_its_folder_whatever_the_name")
        + of("faults/test_prediction_faults.py",
             "a_directory_that_is_removed_takes_nothing_along_that_a_link_in_it_leads_to")
        + of("trial/test_paths.py", "only_marked_directories_are_runs",
             "runs_made_in_the_same_second_get_different_directories")
        + of("data/test_build.py", "other_peoples_data_is_never_overwritten")
        + of(STORE, "a_store_that_is_a_link_is_rebuilt_where_it_leads_and_nothing_outside_is_removed")
        + of("data/test_uploads.py", "a_name_that_could_lead_elsewhere_is_refused",
             "a_list_that_leads_out_of_its_folder_is_refused")
        + of("data/test_file_names.py", "for_any_keys_each_becomes_one_file_within_the_folder_or_none_does",
             "a_hostile_key_ends_a_download_before_a_byte_is_written"),
    ),
    Fault(
        46, "markup and commands in names and labels", "tags in messages, labels, names, rows",
        "escaped wherever it is shown; commands are lists and go through no shell",
        of("records/test_results.py", "html_escapes_what_a_run_says", "markdown_escapes_what_would_break_its_table")
        + of("report/test_report_page.py", "no_secret_and_no_markup_of_a_run_is_in_a_report")
        + of("studies/test_trace_viewer.py", "a_name_cannot_leave_its_place")
        + of("committed/test_commit.py", "lines_can_be_given_to_a_shell")
        + of("data/test_dataset.py", "names_with_markup_are_escaped_in_html")
        + of("test_machine.py", "names_from_the_driver_cannot_inject_markup")
        + of("widgets/test_config_form.py", "messages_are_escaped")
        + of("test_layers.py", "the_source_never_takes_a_dangerous_short_cut"),
    ),
    Fault(
        47, "credentials", "canaries in URLs, environment, options, errors from below",
        "in no repr, YAML, row, event, report, error or pickle",
        of("data/test_stores.py", "a_url_that_names_no_store_is_refused_without_showing_secrets",
           "a_secret_never_reaches_reprs_errors_or_pickles", "an_error_from_below_is_scrubbed")
        + of("data/test_http_client.py", "no_repr_of_an_address_shows_a_key",
             "a_token_is_shown_to_its_store_and_to_nobody_it_points_to")
        + of("trial/test_trial.py", "the_run_directory_holds_the_config_and_no_secret")
        + of("records/test_results.py", "no_secret_is_in_a_row")
        + of("report/test_report_page.py", "no_secret_and_no_markup_of_a_run_is_in_a_report")
        + of("data/tables/test_table_sources.py", "a_pickled_table_is_the_same_table_and_holds_no_password")
        + of("test_secrets_in_text.py", "every_text_field_of_a_config_refuses_it_without_showing_it",
             "no_way_of_making_a_config_takes_or_shows_it"),
    ),
    Fault(
        48, "hostile addresses", "chains, wrappers, unknown schemes, queries",
        "refused by name before anything is asked",
        of("data/test_stores.py", "a_url_that_names_no_store_is_refused_without_showing_secrets")
        + of("data/tables/test_declared_tables.py", "a_password_in_the_file_is_refused_and_not_repeated")
        + of("data/test_hosts.py", "such_a_host_is_no_store_in_any_spelling",
             "no_connection_is_opened_there_by_either_client", "a_redirect_to_such_an_address_is_not_followed")
        + of("data/test_odd_urls.py", "an_odd_url_is_a_named_error_for_every_taker"),
    ),
    Fault(
        49, "rows of inf, nan, None, formulas", "random values and first characters",
        "valid JSON and CSV; no cell begins as a formula does",
        of("records/test_export.py", "csv_reads_back_as_the_same_values", "no_text_begins_as_a_formula_does",
           "nothing_measured_is_an_empty_cell")
        + of("records/test_results.py", "csv_reads_back_and_cannot_hold_a_formula",
             "json_reads_back_as_the_same_rows")
        + of(RANK, "a_loss_that_is_no_number_stands_in_the_row_and_every_file_of_it_is_json"),
    ),
)  # fmt: skip

WIDGETS_AND_NOTEBOOKS = (
    Fault(
        50, "a callback raises", "a back end that fails in a way nobody foresaw; callbacks of users",
        "told in the panel, escaped; the button is back; by code it raises; others are called on",
        of(PANEL, "an_error_that_nobody_foresaw_stands_in_the_panel_and_the_button_is_back")
        + of("trial/test_trial.py", "a_callback_that_raises_is_reported_once_and_the_others_go_on")
        + of("widgets/test_panel.py", "what_cannot_start_is_said_beside_the_button",
             "a_failed_trial_shows_its_root_cause_and_folds_the_traceback"),
    ),
    Fault(
        51, "many clicks, edits and deletions while it runs, two views", "events and threads",
        "one trial, with the config it began with; views agree; a deletion is told",
        of(PANEL, "many_clicks_at_once_start_one_trial",
           "an_edit_while_a_trial_runs_is_of_the_next_and_two_views_of_the_one_agree",
           "a_run_that_is_deleted_under_the_panel_is_told_and_the_next_one_starts")
        + of("widgets/test_panel.py", "methods_mirror_the_controls"),
    ),
    Fault(
        52, "an invalid value is typed", "controls",
        "said beside the field; the last valid config stays",
        of("widgets/test_config_form.py",
           "a_bad_text_is_explained_beside_its_field_and_the_last_valid_config_stays",
           "one_bad_field_does_not_hold_up_the_others", "edits_that_only_fit_together_wait_for_each_other")
        + of("widgets/test_number_field.py", "a_number_out_of_bounds_is_corrected_and_the_form_says_so")
        + of("widgets/test_panel.py", "edits_that_do_not_fit_refuse_to_start"),
    ),
    Fault(
        53, "the cell is run again after its kernel died", "a killed kernel, a new panel",
        "its trials stand there as LOST; nothing is offered that needs the dead process",
        of(PANEL, "after_the_kernel_died_a_new_panel_has_its_trial_as_lost_and_offers_nothing_that_needs_it")
        + of("widgets/test_export_view.py", "a_panel_shows_the_trials_of_its_experiment_when_there_are_some"),
    ),
    Fault(
        54, "very many events, a closed tab, no front end", "long series; nbclient; views that are left",
        "a bounded number of points; updates are coalesced; nothing runs on for nobody",
        of("charts/test_trial_charts.py", "a_long_series_is_binned_without_losing_its_peak",
           "a_long_trial_shows_its_start_and_makes_room_in_steps")
        + of("trial/test_trial.py", "unsubscribed_callbacks_are_not_called_and_no_thread_stays")
        + of("widgets/test_attempts_view.py", "without_a_notebook_nothing_is_shown_and_nothing_fails")
        + of("widgets/test_given_back.py", "many_panels_leave_a_flat_slope",
             "a_forgotten_panel_gives_back_every_widget")
        + of("notebooks/test_notebooks.py", "it_runs_unattended_and_leaves_pictures_and_text"),
    ),
    Fault(
        55, "each notebook; one whose kernel is killed", "nbclient; SIGKILL in a cell",
        "runs unattended; a killed kernel is a failure and leaves no process",
        of("notebooks/test_notebooks.py", "it_runs_unattended_and_leaves_pictures_and_text")
        + of("faults/test_notebook_faults.py",
             "a_kernel_that_is_killed_in_a_notebook_is_a_failure_and_leaves_no_process"),
        "Where there is a browser the tests of the browser run the notebooks instead, and look at what they show.",
    ),
)  # fmt: skip

TABLE = (*WORKER_AND_TRIAL, *DATA, *CONFIG_AND_NAMES, *WIDGETS_AND_NOTEBOOKS)
