"Runs as users start and stop them: papermill's parameters, killed processes, two at once, Ctrl-C, other folders."
import json, os, shutil, signal, subprocess, sys, time
from pathlib import Path

import nbformat, pytest

from cmtrag.runs import RunError, RunFolder, guard, names, read_run, run_id

ROOT = Path(__file__).resolve().parent.parent
ENV  = {**os.environ, 'OMP_NUM_THREADS':'1', 'PYTHONWARNINGS':'ignore'}

def python(code, *args, **kw): return subprocess.Popen([sys.executable, '-c', code, *map(str, args)], env=ENV, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **kw)

# --- parameters through papermill

CELLS = [('import json\nfrom cmtrag.runs import guard, names, project_root, run_id', ()),
         ('before = names(globals())', ()),
         ("reader = 'small'\nk = 5\ntrace = False\ngamma = 0.2\nsystems = 'direct,oracle'\ntag = 'none'", ('parameters',)),
         ("p = guard(globals(), dict(reader=str, k=int, trace=bool, gamma=float, systems=list, tag=str),\n"
          "          choices=dict(reader=['small','llama']), before=before)", ()),
         ("print('GOT', json.dumps([vars(p), str(project_root()), run_id(vars(p))]))", ())]

@pytest.fixture(scope='module')
def notebook(tmp_path_factory):
    nb = nbformat.v4.new_notebook(metadata={'kernelspec': {'name':'python3', 'display_name':'python3', 'language':'python'}})
    for src,tags in CELLS: nb.cells.append(nbformat.v4.new_code_cell(src, metadata={'tags': list(tags)} if tags else {}))
    path = tmp_path_factory.mktemp('nb')/'run.ipynb'
    nbformat.write(nb, path)
    return path

def papermill(nb, *args, cwd=ROOT):
    p = subprocess.run([str(Path(sys.executable).parent/'papermill'), str(nb), str(nb.parent/'out.ipynb'), '--log-output', '--no-progress-bar', *args],
                       cwd=cwd, env=ENV, capture_output=True, text=True, timeout=120)
    out = p.stdout+p.stderr
    got = [l.split('GOT', 1)[1] for l in out.splitlines() if 'GOT [' in l]
    return p.returncode, out, json.loads(got[-1]) if got else None

def test_guessed_types_are_cast_and_the_folder_does_not_matter(notebook):
    args = ['-p','k','1e3', '-p','trace','true', '-p','gamma','1', '-p','systems','oracle', '-r','tag','007', '-p','reader','llama']
    rc,out,got = papermill(notebook, *args, cwd='/')
    assert rc==0, out[-2000:]
    p,root,rid = got
    assert p==dict(reader='llama', k=1000, trace=True, gamma=1., systems=['oracle'], tag='007') and type(p['k']) is int and type(p['gamma']) is float
    assert root==str(ROOT) and rid==run_id(p)

def test_a_misspelt_name_alone_stops_the_run(notebook):
    rc,out,got = papermill(notebook, '-p','redaer','llama')
    assert rc!=0 and got is None and "unknown parameter 'redaer'; did you mean 'reader'?" in out, out[-2000:]

def test_every_problem_is_listed(notebook):
    rc,out,got = papermill(notebook, '-p','reader','lama', '-p','k','abc', '-p','tag','007', '-p','READER','x')
    assert rc!=0 and got is None
    for s in ("did you mean 'llama'?", 'must be an int', 'tag=7: is text', 'give it with -r', "unknown parameter 'READER'"): assert s in out, out[-2000:]

def test_guard_again_after_later_cells():
    ns = {}
    before = names(ns)
    exec(CELLS[2][0], ns)
    ns.pop('__builtins__')
    spec = dict(reader=str, k=int, trace=bool, gamma=float, systems=list, tag=str)
    guard(ns, spec, before=before)
    ns['rows'] = [1]  # what a later cell made
    guard(ns, spec, before=before)

# --- a run that dies

WRITER = """
import sys
from cmtrag.runs import RunFolder
run = RunFolder('t', dict(a=1), sys.argv[1])
i = len(run.done)
print(i, run.torn, flush=True)
while True:
    run.append(dict(i=i, text='x'*20000), ('d', i))
    i += 1
    print(i, flush=True)
"""

def test_killed_while_appending(tmp_path):
    before = 0
    for n in range(4):
        p = python(WRITER, tmp_path)
        start = int(p.stdout.readline().split()[0])
        assert start >= before  # nothing that was announced is lost
        for _ in range(5+3*n): last = int(p.stdout.readline())
        p.send_signal(signal.SIGKILL)
        p.wait()
        before = last
    run = RunFolder('t', dict(a=1), tmp_path)
    assert len(run.done) >= before and list(run.done)==[('d', i) for i in range(len(run.done))]
    assert all(r['i']==i for (_,i),r in run.done.items())

def test_torn_at_every_byte(tmp_path):
    run = RunFolder('t', dict(a=1), tmp_path/'whole')
    for i in range(3): run.append(f'é\n"{i}"', i)
    data = run.turns.read_bytes()
    ends = [i+1 for i,b in enumerate(data) if b==10]
    assert len(ends)==3  # a line end inside a record is escaped
    other = RunFolder('t', dict(a=1), tmp_path/'cut')
    for n in range(len(data)+1):
        other.turns.write_bytes(data[:n])
        r = RunFolder('t', dict(a=1), tmp_path/'cut')
        whole = sum(e<=n for e in ends)
        assert len(r.done)==whole and r.torn==(n not in (0, *ends)) and r.turns.stat().st_size==(ends[whole-1] if whole else 0)

@pytest.mark.parametrize('bad', [b'garbage\n', b'{"key": 1}\n', b'{"key": {}, "record": 1}\n', b'[]\n', b'\x00\x00\n', b'\xff\n', b'\n'])
def test_a_damaged_line_is_named(tmp_path, bad):
    run = RunFolder('t', dict(a=1), tmp_path)
    run.append(1, 'a')
    with run.turns.open('ab') as f: f.write(bad+b'{"key": "b", "record": 2}\n')
    with pytest.raises(RunError, match=r'turns\.jsonl:2'): RunFolder('t', dict(a=1), tmp_path)

def test_a_second_process_is_refused_and_may_read(tmp_path):
    p = python(WRITER, tmp_path)
    for _ in range(3): p.stdout.readline()
    with pytest.raises(RunError, match='another process'): RunFolder('t', dict(a=1), tmp_path)
    assert len(read_run(next((tmp_path/'t').iterdir())).records) >= 1
    RunFolder('t', dict(a=2), tmp_path)  # another configuration is another folder
    p.kill()
    p.wait()
    RunFolder('t', dict(a=1), tmp_path)

def test_threads_append_whole_lines(tmp_path):
    from concurrent.futures import ThreadPoolExecutor
    run = RunFolder('t', dict(a=1), tmp_path)
    with ThreadPoolExecutor(8) as ex: list(ex.map(lambda i: run.append(dict(i=i, x='y'*5000), i), range(200)))
    again = RunFolder('t', dict(a=1), tmp_path)
    assert again.done=={i: dict(i=i, x='y'*5000) for i in range(200)} and not again.torn

# --- interrupting, progress, folders

INTERRUPTED = """
import time
from cmtrag.runs import map_local
started = []
def work(x): started.append(x); time.sleep(.2); return x
try:
    print('ready', flush=True)
    for r in map_local(work, range(1000), workers=3): pass
except KeyboardInterrupt: print('stopped', len(started), flush=True)
"""

def test_ctrl_c_stops_soon():
    p = python(INTERRUPTED)
    assert p.stdout.readline()=='ready\n'
    time.sleep(.5)
    p.send_signal(signal.SIGINT)
    t = time.time()
    out,err = p.communicate(timeout=20)
    assert out.startswith('stopped') and int(out.split()[1])<40 and time.time()-t<10, (out, err)

def test_progress_in_a_pipe_is_short():
    out,err = python('from cmtrag.runs import progress\nfor x in progress(range(1000), desc="turn"): pass').communicate(timeout=60)
    assert 1<=len((out+err).splitlines())<=30 and 'turn 1000/1000' in out

def test_root_of_an_installed_package(tmp_path):
    site,work = tmp_path/'site',tmp_path/'work'
    shutil.copytree(ROOT/'cmtrag', site/'cmtrag', ignore=shutil.ignore_patterns('__pycache__'))
    work.mkdir()
    (work/'settings.ini').write_text('[DEFAULT]\nlib_name = another_project\n')
    def root(cwd, **env):
        code = 'import cmtrag.runs as r; print(r.__file__); print(r.project_root())'
        return subprocess.run([sys.executable, '-c', code], cwd=cwd, env={**ENV, 'PYTHONPATH':str(site), **env}, capture_output=True, text=True, check=True).stdout.split()
    assert root(work)==[str(site/'cmtrag'/'runs.py'), str(work)]
    assert root('/', CMTRAG_HOME=str(work))[1]==str(work)

def test_import_is_light():
    code = "import sys, cmtrag.runs, cmtrag.llm; print([m for m in ('torch','transformers','faiss','pandas','matplotlib','openai','numpy') if m in sys.modules])"
    assert python(code).communicate(timeout=60)[0].strip()=='[]'
