"""The command line. Nothing heavy is imported before a command needs it.

Exit status: 0 done; 1 some clips failed; 2 the request is wrong; 130 interrupted.
"""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.bench import commands
from pipeline.console import console
from pipeline.errors import RequestError

if TYPE_CHECKING:
    from pipeline.plan import Plan

app = typer.Typer(
    help="Renders batches of video clips from a manifest, on one machine or many.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(commands.app, name="bench")

_Manifest = Annotated[Path, typer.Argument(help="The manifest: a YAML or JSON file.")]
_Output = Annotated[
    str | None,
    typer.Option(
        metavar="FOLDER",
        help="Where the batch's folder goes, instead of what the manifest says.",
    ),
]
_Where = Annotated[
    str, typer.Argument(help="A batch's folder, or the output that holds it.")
]


@app.command()
def render(manifest: _Manifest, output: _Output = None) -> None:
    """Render a manifest's clips, or go on with them."""
    from pipeline.models import require_weights

    plan = _plan(manifest, output)
    require_weights(plan.model)
    from pipeline.run import render

    raise typer.Exit(render(plan, console=console()))


@app.command()
def plan(
    manifest: _Manifest,
    output: _Output = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show what a render would do, and where it goes."""
    from pipeline.plan import plan_json, plan_table

    planned = _plan(manifest, output)
    said = plan_table(planned)
    if as_json:
        said = json.dumps(plan_json(planned), indent=1, ensure_ascii=False)
    typer.echo(said)


@app.command()
def status(
    output: _Where,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    watch: Annotated[bool, typer.Option(help="Until every clip has ended.")] = False,
) -> None:
    """Show how far a batch is, from its folder alone."""
    from pipeline.status import show

    code = show(output, as_json=as_json, watch=watch, console=console())
    raise typer.Exit(code)


@app.command()
def retry(
    output: _Where,
    clip: Annotated[str | None, typer.Option(help="Only this clip.")] = None,
) -> None:
    """Put failed clips back, for the next render."""
    from pipeline.status import retry

    raise typer.Exit(retry(output, clip=clip, console=console()))


@app.command()
def stitch(
    output: _Where,
    beam_options: Annotated[
        list[str] | None,
        typer.Argument(help="After `--`: Beam's own options, as --name=value."),
    ] = None,
    runner: Annotated[
        str, typer.Option(help="Name of the Beam runner.")
    ] = "FnApiRunner",
) -> None:
    """Make the videos of rendered clips: the Beam job."""
    from pipeline.batch import find_batches
    from pipeline.report import write_report
    from pipeline.stitch import stitch_batch
    from pipeline.store import StoreError

    failed = False
    try:
        for uri in find_batches(output):
            for result in stitch_batch(uri, runner=runner, options=beam_options):
                failed |= not result.ok
                said = f"{result.frames} frames" if result.ok else result.reason
                typer.echo(f"{result.clip}: {said}")
            typer.echo(write_report(uri))
    except StoreError as error:
        raise RequestError(str(error)) from error
    raise typer.Exit(int(failed))


@app.command()
def compare(
    a: Annotated[
        str, typer.Argument(metavar="A", help="A batch's folder, or a video.")
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="The other one's.")],
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a page with the worst frames there."),
    ] = None,
) -> None:
    """Compare two renders frame by frame: PSNR and SSIM."""
    from pipeline.compare import show

    show(a, b, as_json=as_json, html=html, console=console())


@app.command()
def doctor() -> None:
    """Tell what this machine lacks, and what to do."""
    from pipeline.doctor import examine, report

    checks = examine(Path())
    console().print(report(checks))
    raise typer.Exit(int(any(check.ok is False for check in checks)))


def main() -> None:
    """Runs the command line and ends the process."""
    try:
        app(prog_name="tilereel")
    except RequestError as error:
        # What a manifest says may hold half characters, which no terminal takes.
        message = f"tilereel: {error}".encode(errors="backslashreplace").decode()
        print(message, file=sys.stderr)
        sys.exit(2)


def _plan(manifest: Path, output: str | None) -> "Plan":
    from pipeline.document import read_document
    from pipeline.manifest import check_manifest
    from pipeline.plan import make_plan

    document = read_document(manifest)
    checked = check_manifest(document)
    return make_plan(checked, output, folder=manifest.parent, document=document)
