"""A run from the outside: its folder and lock, its signals, its status, whatever ends it; not the loop."""

from __future__ import annotations

from llm_pretrain.config import Config
from llm_pretrain.training.agreement import check_precision, on_every_rank, on_first_rank
from llm_pretrain.training.compiling import check_compiler
from llm_pretrain.training.engine import Engine
from llm_pretrain.training.float8 import check_float8
from llm_pretrain.training.loop import Training
from llm_pretrain.training.out_of_memory import out_of_memory_in_words
from llm_pretrain.training.peers import lost_contact
from llm_pretrain.training.reporting import report_run
from llm_pretrain.training.run_folder import RunFolder
from llm_pretrain.training.signals import StopRequest
from llm_pretrain.training.status import Status
from llm_pretrain.training.watchdog import beat, report_hangs_to


def pretrain(config: Config, engine: Engine) -> int:
    """Run the training that `config` describes, from its newest checkpoint if it has one.

    Returns:
        The worker's exit code: 0 finished, 75 stopped by a signal after a clean save.

    Raises:
        PretrainError: with the exit code of its kind; `status.json` says the same.
    """
    folder = RunFolder(config.run.folder)
    with StopRequest(says=engine.rank == 0) as stop:  # to the very end, or a second signal would tear it
        beat("opening the run's folder")
        on_first_rank(engine, folder.acquire)  # nobody passes before every rank has its handlers
        status = Status(
            folder.status, rank=engine.rank, world_size=engine.world_size, launcher=engine.launcher
        )
        try:
            status.started()
            report_hangs_to(folder, status)
            check_precision(engine, config)
            on_every_rank(engine, lambda: check_compiler(config))
            on_every_rank(engine, lambda: check_float8(config))
            training = Training(config, engine, folder, status, stop)
            with out_of_memory_in_words(training.config, engine):
                exit_code = training.run()
        except BaseException as error:
            lost = lost_contact(error, engine.rank)
            status.failed(lost or error)
            if lost:
                raise lost from None
            raise
        finally:
            if engine.rank == 0 and config.logging.report:
                beat("writing the report")
                report_run(folder)
            folder.release()
        beat("leaving the process group")
        engine.close()
    return exit_code
