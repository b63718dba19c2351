"The shape of the project: one way down, one module a notebook, imports apart, one `parameters` cell, a light import."
import ast, json, os, re, subprocess, sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NBS  = sorted((ROOT/'nbs').glob('[0-9]*.ipynb'))
ids  = lambda ps: [p.stem for p in ps]

def cells(p): return json.loads(p.read_text(encoding='utf-8'))['cells']
def code(p): return [''.join(c['source']) for c in cells(p) if c['cell_type']=='code']
def module(p): return next((m[1] for s in code(p) if (m := re.search(r'^#\|\s*default_exp\s+(\S+)', s, re.M))), None)
def number(p): return int(p.stem[:2])
def python(s): return '\n'.join(l for l in s.splitlines() if not l.lstrip().startswith(('%', '!')))

OWNER = {module(p): number(p) for p in NBS if module(p)}

def imported(tree):
    "Project modules that a cell's code imports, wherever the import stands."
    for n in ast.walk(tree):
        if isinstance(n, ast.ImportFrom) and n.module and n.module.split('.')[0]=='cmtrag':
            yield from ([n.module[len('cmtrag.'):]] if '.' in n.module else [a.name for a in n.names])
        elif isinstance(n, ast.Import): yield from (a.name[len('cmtrag.'):] for a in n.names if a.name.startswith('cmtrag.'))

def upward(num, sources):
    "Imports of modules that live in the same or a higher notebook."
    return [m for s in sources for m in imported(ast.parse(python(s))) if OWNER.get(m.split('.')[0], OWNER.get(m, -1)) >= num]

@pytest.mark.parametrize('p', NBS, ids=ids(NBS))
def test_imports_point_down(p):
    own = module(p)
    assert [m for m in upward(number(p), code(p)) if m!=own]==[]

def test_an_upward_import_would_be_seen():
    assert upward(0, ['from cmtrag.sources import Corpus'])==['sources']
    assert upward(0, ['def f():\n    from cmtrag import sources'])==['sources']
    assert upward(99, ['from cmtrag.sources import Corpus'])==[]

def test_every_project_import_is_known():
    known = set(OWNER)
    assert [m for p in NBS for s in code(p) for m in imported(ast.parse(python(s))) if not {m, m.split('.')[0]} & known]==[]  # `baselines.direct` is a module, `baselines` none

def test_one_notebook_one_module():
    mods = [module(p) for p in NBS if module(p)]
    assert len(mods)==len(set(mods)) and len(mods)>10

@pytest.mark.parametrize('p', NBS, ids=ids(NBS))
def test_cells_that_import_only_import(p):
    for s in code(p):
        kinds = {isinstance(n, (ast.Import, ast.ImportFrom)) for n in ast.parse(python(s)).body}
        assert len(kinds)<2, f'{p.name}: imports and other code in one cell:\n{s}'

@pytest.mark.parametrize('p', NBS, ids=ids(NBS))
def test_size(p):
    cs = cells(p)
    assert len(cs)<=120, f'{p.name} has {len(cs)} cells'
    for s in code(p):
        if re.match(r'#\|\s*export', s): assert len([l for l in s.splitlines() if l.strip()])<=50, f'{p.name}: long exported cell:\n{s[:200]}'

@pytest.mark.parametrize('p', NBS, ids=ids(NBS))
def test_parameters_tag(p):
    tagged = [c for c in cells(p) if 'parameters' in c['metadata'].get('tags', [])]
    assert len(tagged)==(1 if 40<=number(p)<80 else 0)
    for c in tagged:
        for n in ast.parse(''.join(c['source'])).body:
            assert isinstance(n, ast.Assign) and isinstance(n.value, ast.Constant), f'{p.name}: parameters are literals only: {ast.unparse(n)}'

def test_clean_keeps_the_tag(tmp_path):
    nb = ROOT/'nbs'/'40_eval.ipynb'
    copy = tmp_path/'40_eval.ipynb'
    copy.write_text(nb.read_text(encoding='utf-8'), encoding='utf-8')
    subprocess.run([Path(sys.executable).parent/'nbdev_clean', '--fname', copy], cwd=ROOT, check=True, capture_output=True)
    assert sum('parameters' in c['metadata'].get('tags', []) for c in cells(copy))==1

def test_import_is_light():
    p = subprocess.run([sys.executable, '-X', 'importtime', '-c', 'import cmtrag'], cwd=ROOT, capture_output=True, text=True, check=True)
    rows = [l.split('|') for l in p.stderr.splitlines() if l.startswith('import time:') and l.count('|')==2]
    mods = {r[2].strip() for r in rows}
    assert not mods & {'torch', 'transformers', 'faiss', 'pandas', 'matplotlib', 'numpy', 'openai'}
    assert 'cmtrag' in mods

def test_nbdev_is_the_pinned_major():
    from importlib.metadata import version
    assert version('nbdev').split('.')[0]=='2'

HOSTS = re.compile(r'pypi\.org|pythonhosted|download\.pytorch|/work/|/root/|/home/\w')
def test_nothing_names_a_machine():
    "No registry host and no machine path in anything that is tracked."
    files = subprocess.run(['git', 'ls-files'], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    bad = [f for f in files if f!='tests/test_structure.py' and (ROOT/f).suffix in ('.py', '.ipynb', '.md', '.ini', '.yaml', '.json', '.txt', '.csv', '.svg', '')
           and (ROOT/f).is_file() and HOSTS.search((ROOT/f).read_text(encoding='utf-8', errors='replace'))]
    assert bad==[]
