"""The reader of the compiler's schedule, on text written by hand and by hypothesis.

The text has the form of libtpu 0.0.42.1's. That the compiler still writes it so is for
test_bundles.py to say.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.bench.schedule import Block, ScheduleError, Work, parse, read, read_all

HEADER = """= control target key start
LH: loop header
LB: loop body
PB: predicated region body
PF: predicated region fallthrough
= control target key end

"""
UNITS = ("MXU", "VALU", "VLOAD:FILL", "VSTORE:SPILL", "SALU")

# A kernel with a grid of unknown length, one start of a row (2 bundles), a loop of
# three trips over a body of 6, and one end of a row (1 bundle).
SAMPLE = """\
     0   :  { %s1_s0 = inlined_call_operand.hbm [shape: bf16[8,8]] } /* entry */
   0x1   :  { %s9_s9 = smov 0 } /* Start region 40 :: End region 40 */
   0x2 LB: > { %s8_s8 = sphi %s9_s9, %s7_s7 /* iteration index, stage = 0 */ } /* Start region 7 */
   0x3   : > { %11 = sbr.rel (%p1_p0) target = $region20  ;;  %s4_s4 = smov 1 }
   0x4   :  {}
   0x5   :  {}
   0x6   :  {}
   0x7   :  {} /* End region 3 */
   0x8   : > { %12 = vst [vmem:[#allocation2] sm:$0xff] %v1_v1 /* spans
two lines: { = sbr.rel target = $region99 } */ }
   0x9   : > { %13 = vst [vmem:[#allocation2] sm:$0xff] %v1_v1 }
   0xa PF: > { %s5_s26 = smov 2 /* copy for cssa */ } /* Start/End empty region 20 */
   0xb LB: >> { %s2_s26 = sphi %s5_s26, %s3_s26 /* phi copy */ } /* Start region 30 */
   0xc   : >> { %s3_s26 = sadd.s32 4, %s2_s26  ;;  %14 = vmatmul.mubr.bf16.gmra.mxu0 %v2_v2  ;;  %15 = vmatmul.mubr.f32.gmra.mxu1 %v2_v2 }
   0xd   : >> { %p2_p1 = scmp.ge.s32.totalorder (%p1_p0), %s3_s26, 14 /* loop exit test */  ;;  %16 = sbr.rel (!%p2_p1) target = $region30 }
   0xe   :  {}
   0xf   :  {}
  0x10   :  {}
  0x11   : >> { %v3_v3 = vld [vmem:[#allocation3_spill] sm:$0xff] } /* End region 30 */
  0x12   : > { %17 = sbr.rel (%p3_p2) target = $region51 }
  0x13   :  {}
  0x14   :  {}
  0x15   :  {}
  0x16   :  {}
  0x17   : > { %18 = vst [vmem:[%s1_s0] sm:$0xff] %v3_v3 } /* End region 50 */
  0x18 PF: > { %p4_p3 = scmp.ge.s32.totalorder %s7_s7, %s6_s6 /* loop exit test */ } /* Start/End empty region 51 :: End region 7 */
  0x19   : > { %19 = sbr.rel (!%p4_p3) target = $region7 }
  0x1a   :  {}
  0x1b   :  {}
  0x1c   :  {}
  0x1d   :  {}
  0x1e   :  { %20 = vsyncpa [#allocation4], 1 } /* exit */
"""  # noqa: E501
SAMPLE_USE = {0xC: (2, 0, 0, 0, 1), 0x11: (0, 1, 1, 0, 0), 0x8: (0, 0, 0, 1, 0)}


def utilization(bundles, use):
    """The table of units, for bundles that use none but those of `use`."""
    rows = [use.get(address, (0,) * len(UNITS)) for address in range(bundles)]
    table = "".join(" ".join(map(str, row)) + "\n" for row in rows)
    names, capacity = ", ".join(UNITS), "2 4 3 2 2"
    return f"== CAPACTIY:\n{names}\n{capacity}\n== UTILIZATION:\n{table}"


def sample():
    return parse(HEADER + SAMPLE, utilization(31, SAMPLE_USE))


def outline(block: Block):
    inner = [outline(within) for within in block.blocks]
    return block.kind, block.first, block.last, block.own.bundles, inner


def test_blocks_are_found_by_their_branches():
    start, end = ("branch", 8, 9, 2, []), ("branch", 0x17, 0x17, 1, [])
    grid = ("grid", 2, 0x1D, 18, [start, ("loop", 0xB, 0x11, 7, []), end])
    assert outline(sample()) == ("kernel", 0, 0x1E, 3, [grid])


def test_a_tile_counts_its_loop_as_often_as_it_runs_and_no_start_or_end_of_a_row():
    (grid,) = sample().blocks
    loop = grid.blocks[1]
    assert loop.trips == 3  # 2, 6 and 10, up to 14
    (body,) = grid.bodies()
    assert body.bundles == 18 + 3 * 7
    assert body.units == {
        "MXU": 6,
        "VALU": 3,
        "VLOAD:FILL": 3,
        "VSTORE:SPILL": 0,
        "SALU": 3,
    }
    assert body.spills == 0
    assert body.mxu_cycles == 3 * (8 + 4)
    assert body.matmul_cycles == 18


def test_work_adds_up_and_multiplies():
    one = Work(1, 8, {"MXU": 2})
    assert one + Work(2, 0, {"XLU": 1}) == Work(3, 8, {"MXU": 2, "XLU": 1})
    assert one * 3 == Work(3, 24, {"MXU": 6})


def test_a_loop_of_unknown_trips_asks_for_them():
    text = SAMPLE.replace("smov 2 /*", "sld [smem:[#allocation1]] /*")
    (grid,) = parse(text, utilization(31, SAMPLE_USE)).blocks
    assert grid.blocks[1].trips is None
    with pytest.raises(ScheduleError, match="give its trips"):
        grid.bodies()
    (body,) = grid.bodies(trips=5)
    assert body.bundles == 18 + 5 * 7


def test_a_loop_that_only_a_break_ends_is_of_unknown_trips():
    text = SAMPLE.replace("sbr.rel (!%p2_p1)", "sbr.rel")
    (grid,) = parse(text, utilization(31, {})).blocks
    assert (grid.blocks[1].kind, grid.blocks[1].trips) == ("loop", None)


def test_each_branch_with_matmuls_is_a_body_of_its_own():
    matmul = "%1 = vmatmul.mubr.msk.bf16.gmra.mxu0 %v1_v1"
    text = SAMPLE.replace("%13 = vst", f"{matmul}  ;;  %13 = vst")
    (grid,) = parse(text, utilization(31, {})).blocks
    straight, with_branch = grid.bodies()
    assert with_branch.bundles == straight.bundles + 2
    assert with_branch.mxu_cycles == straight.mxu_cycles + 8


@given(
    start=st.integers(0, 1000),
    step=st.integers(1, 300),
    trips=st.integers(1, 1000),
    slack=st.integers(0, 299),
)
def test_trips_are_those_of_the_range(start, step, trips, slack):
    limit = start + trips * step - slack % step
    text = SAMPLE.replace("smov 2 /*", f"smov {start} /*")
    text = text.replace("sadd.s32 4", f"sadd.s32 {step}")
    text = text.replace("%s3_s26, 14 /*", f"%s3_s26, {limit} /*")
    (grid,) = parse(text, utilization(31, {})).blocks
    assert grid.blocks[1].trips == len(range(start, limit, step))


# A run of bundles, a branch round blocks, or a loop over blocks.
trees = st.recursive(
    st.tuples(st.just("run"), st.integers(1, 5)),
    lambda inner: st.tuples(
        st.sampled_from(("branch", "loop")), st.lists(inner, min_size=1, max_size=3)
    ),
    max_leaves=8,
)


def render(trees, lines, numbers):
    """Appends the bundles of `trees` to `lines`; returns their blocks' outline."""
    blocks = []
    for kind, what in trees:
        if kind == "run":
            lines += ["{}"] * what
            continue
        region = next(numbers)
        if kind == "branch":
            branch = f"{{ %1 = sbr.rel (%p1) target = $region{region} }}"
            lines += [branch, "{}", "{}", "{}", "{}"]
            first = len(lines)
            inner = render(what, lines, numbers)
            blocks.append(("branch", first, len(lines) - 1, inner))
            lines.append(f"{{}} /* Start/End empty region {region} */")
        else:
            first = len(lines)
            lines.append(f"{{}} /* Start region {region} */")
            inner = render(what, lines, numbers)
            branch = f"{{ %1 = sbr.rel (!%p1) target = $region{region} }}"
            lines += [branch, "{}", "{}", "{}", "{}"]
            blocks.append(("loop", first, len(lines) - 1, inner))
    return blocks


def shape(block):
    inner = [shape(within) for within in block.blocks]
    return block.kind, block.first, block.last, inner


def bundles_of(block):
    return block.own.bundles + sum(map(bundles_of, block.blocks))


@given(st.lists(trees, min_size=1, max_size=4))
def test_blocks_nest_as_they_were_written_and_hold_every_bundle_once(trees):
    lines = []
    blocks = render(trees, lines, iter(range(1000)))
    text = "".join(f"{address:#x} : {line}\n" for address, line in enumerate(lines))
    root = parse(text, utilization(len(lines), {}))
    assert [shape(block) for block in root.blocks] == blocks
    assert bundles_of(root) == len(lines)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("   0x8   :", "   0x9   :", "bundle 0x8 is missing"),
        ("target = $region51", "target = $region52", "unknown region"),
        ("= sbr.rel (%p3_p2)", "= sbr.ind (%p3_p2)", "unlike others"),
        ("vmatmul.mubr.f32", "vmatmul.mubr.f7", "a matmul of f7"),
        # A branch from within the loop to behind it.
        (
            "   0xc   : >> {",
            "   0xc   : >> { %1 = sbr.rel target = $region51 ;;",
            "out",
        ),
    ],
)
def test_what_is_unlike_the_known_form_is_an_error(old, new, message):
    assert old in SAMPLE
    with pytest.raises(ScheduleError, match=message):
        parse(SAMPLE.replace(old, new), utilization(31, {}))


def test_a_table_of_another_length_is_an_error():
    with pytest.raises(ScheduleError, match="31 bundles.* 30"):
        parse(SAMPLE, utilization(30, {}))


def test_no_bundles_are_an_error():
    with pytest.raises(ScheduleError, match="no bundles"):
        parse(HEADER, utilization(0, {}))


HLO = """
  %other.1 = bf16[8]{0} custom-call(%x), backend_config={"used_scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"1"}]}
  ROOT %mine.3 = bf16[8]{0} custom-call(%x), frontend_attributes={
    }, backend_config={"used_scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"4096"}]}
"""  # noqa: E501


def write(folder, name):
    (folder / f"123-{name}-71-final_bundles.txt").write_text(HEADER + SAMPLE)
    use = f"123-{name}-69-final_hlo-static-per-bundle-utilization.txt"
    (folder / use).write_text(utilization(31, SAMPLE_USE))
    schedule = f"123-{name}-70-schedule-analysis_final_bundles.txt"
    (folder / schedule).write_text("not to be taken for the bundles")
    (folder / "compiled.txt").write_text(HLO)


@pytest.mark.parametrize("name", ["mine", "mine.3"])
def test_a_kernel_is_read_by_its_name(tmp_path, name):
    write(tmp_path, "mine.3")
    write(tmp_path, "other.1")
    schedule = read(tmp_path, name)
    assert (schedule.kernel, schedule.total, schedule.vmem) == ("mine.3", 31, 4096)
    assert schedule.step.kind == "grid"
    assert schedule.tile().bundles == 18 + 3 * 7


def test_a_kernel_without_matmuls_has_no_tile(tmp_path):
    write(tmp_path, "mine.3")
    path = tmp_path / "123-mine.3-71-final_bundles.txt"
    path.write_text(SAMPLE.replace("vmatmul", "vadd"))
    with pytest.raises(ScheduleError, match=r"mine\.3 has no matmuls"):
        read(tmp_path, "mine").tile()


def test_a_missing_kernel_is_named_with_those_there_are(tmp_path):
    write(tmp_path, "mine.3")
    with pytest.raises(ScheduleError, match=r"named 'min', and 0 are; .* has: mine\.3"):
        read(tmp_path, "min")
    with pytest.raises(ScheduleError, match=r"no kernel named 'min'; .* has: mine\.3"):
        read_all(tmp_path, "min")


def test_a_name_of_two_kernels_is_an_error(tmp_path):
    write(tmp_path, "mine.3")
    write(tmp_path, "mine.4")
    with pytest.raises(ScheduleError, match=r"and 2 are; .* mine\.3, mine\.4"):
        read(tmp_path, "mine")


def test_a_kernel_whose_vmem_is_not_said_is_an_error(tmp_path):
    write(tmp_path, "mine.9")
    with pytest.raises(ScheduleError, match="how much VMEM"):
        read(tmp_path, "mine")
