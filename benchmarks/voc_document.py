""" Puts what came out of the runs of benchmarks/voc.py into a document """
from pathlib import Path
from typing import Any, Sequence

from voc_pictures import PICTURES
from voc_records import Run
from voc_results import Report
from voc_time import format_times

from timm_splicemix.files import atomic_write


def describe_runs(runs: Sequence[Run]) -> str:
    """ What was run: flags, versions and hours.

    Args:
        runs: Runs of one recipe.
    """
    first = runs[0]
    hours = sum(run.record['seconds'] for run in runs) / 3600
    lines = [
        f'{sum(run.is_finished for run in runs)} runs are finished. All took {hours:.1f} hours of one process, beside '
        'whatever else the machine did.', '',
        f'All of them: `train.py {" ".join(first.record["recipe"])}`, weights {first.record["weights"]}.', '']
    versions = first.environment()
    if versions:
        words = [f'{name} {versions[name]}' for name in ('python', 'torch', 'timm', 'timm_splicemix')]
        lines += [f'Versions: {", ".join(words)}.', '']
    lines += ['| arm | flags of its own |', '|---|---|']
    for arm in dict.fromkeys(run.arm for run in runs):
        flags = ' '.join(arm.flags)
        lines.append(f'| {arm.title} | `{flags}` |' if flags else f'| {arm.title} | |')
    return '\n'.join(lines)


def marks(section: str) -> tuple[str, str]:
    """Lines of a document between which the results of a section stand."""
    return f'<!-- {section}: begin -->', f'<!-- {section}: end -->'


def write_document(path: Path, section: str, report: Report, times: Sequence[dict[str, Any]] = ()) -> None:
    """ Put tables and pictures between the marks of a section; pictures go beside the document.

    Args:
        path: Document in Markdown with the two marks.
        section: Name of the section, and the beginning of those of the pictures.
        report: What is put there.
        times: What `voc_time.measure` returned, () for none.
    """
    parts = [report.text()]
    if times:
        parts.append(format_times(times))
    if report.runs:
        parts.insert(0, describe_runs(report.runs))
        for name, (title, draw) in PICTURES.items():
            file = path.with_name(f'{section}-{name}.png')
            if draw(report, file):
                parts.append(f'![{title}]({file.name})')
    write_section(path, section, '\n\n'.join(parts))


def write_section(path: Path, section: str, body: str) -> None:
    """ Put a text between the marks of a section.

    Args:
        path: Document in Markdown with the two marks.
        section: Name of the section.
        body: The text.
    """
    text = path.read_text(encoding='utf-8')
    begin, end = marks(section)
    head, found, rest = text.partition(begin)
    _, found_end, tail = rest.partition(end)
    if not found or not found_end:
        raise ValueError(f"Expected the lines '{begin}' and '{end}' in {path}, but got a document without.")
    with atomic_write(path) as temporary:
        temporary.write_text(f'{head}{begin}\n{body}\n{end}{tail}', encoding='utf-8')
