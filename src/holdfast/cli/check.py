"""`holdfast check`: is this log, or every log of this queue, as it should be?"""

from __future__ import annotations

from holdfast.cli.opened import is_queue
from holdfast.cli.options import AsJson, Folder
from holdfast.cli.output import DAMAGED, OK, command, print_json, stdout
from holdfast.cli.owner import owner_of
from holdfast.cli.reports import progress_bar, report_document, show_report
from holdfast.cli.wholequeue import check_queue
from holdfast.storage.check import check


@command
def check_command(folder: Folder, as_json: AsJson = False) -> int:
    """Check every byte of a queue or a log. Takes no lock and changes nothing.

    Exit code: 0 nothing is damaged, 1 damage was found, 2 it cannot be looked at.
    """
    if is_queue(folder):
        return check_queue(folder, as_json=as_json)
    owner = owner_of(folder)
    alive = owner is not None and owner.alive is True
    with progress_bar("checking", shown=not as_json) as progress:
        report = check(folder, owned=True if alive else None, progress=progress)
    if as_json:
        print_json(report_document(report, owned=alive))
    else:
        show_report(stdout(), report, owned=alive)
    return OK if report.ok else DAMAGED
