"Runs everything `make test` promises and ends with one line `N passed, M failed, K skipped`."
import os, re, subprocess, sys, time, xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

root = Path(__file__).resolve().parent.parent
bin  = Path(sys.executable).parent
logs = root/'outputs'/'_test'
env  = {**os.environ, 'OMP_NUM_THREADS':'1', 'PYTHONWARNINGS':'ignore', 'HF_HUB_OFFLINE':'1', 'TOKENIZERS_PARALLELISM':'false'}

def run(name, cmd, timeout=900):
    "One command: (name, passed, failed, skipped), its output kept in a log that is shown when it fails."
    t = time.time()
    try:
        p = subprocess.run([str(c) for c in cmd], cwd=root, env=env, capture_output=True, text=True, timeout=timeout)
        rc,out = p.returncode,p.stdout+p.stderr
        if 'No files were eligible' in out: rc = rc or 1  # nbdev_test passes over a notebook that it doesn't find
    except subprocess.TimeoutExpired as e: rc,out = 124,f'timed out after {timeout} s\n{e.stdout or ""}'
    (logs/f'{name}.log').write_text(out)
    print(f'{"ok  " if rc==0 else "FAIL"} {name} ({time.time()-t:.0f} s)', flush=True)
    if rc: print(out[-4000:], flush=True)
    return rc

def notebook(p): return run(p.stem, [bin/'nbdev_test', '--path', p, '--n_workers', '0'])

extra = dict(l.split(None, 1) for l in (root/'tests'/'smoke.txt').read_text().splitlines() if l.strip() and not l.startswith('#'))

def smoke(p):
    "A run notebook, smoke size, through papermill as a user runs it."
    return run(p.stem, [bin/'papermill', p, logs/f'{p.stem}.ipynb', '--no-progress-bar', *extra.get(p.stem, '').split()])

def pytests():
    xml = logs/'pytest.xml'
    xml.unlink(missing_ok=True)
    rc = run('pytest', [sys.executable, '-m', 'pytest', '-q', '-m', 'not soak', 'tests', f'--junitxml={xml}', '-p', 'no:cacheprovider', '--durations=8'], timeout=2700)
    if not xml.exists(): return 0,1,0
    s = ET.parse(xml).getroot().find('testsuite').attrib
    n,f,k = int(s['tests']),int(s['failures'])+int(s['errors']),int(s['skipped'])
    return n-f-k, max(f, int(rc!=0)), k

def main():
    logs.mkdir(parents=True, exist_ok=True)
    nbs  = sorted((root/'nbs').glob('[0-9]*.ipynb'))
    libs = [p for p in nbs if int(p.stem[:2]) < 40] + [root/'nbs'/'index.ipynb']
    runs = [p for p in nbs if int(p.stem[:2]) >= 40 and extra.get(p.stem)!='by hand']
    left = sum(v=='by hand' for v in extra.values())
    with ThreadPoolExecutor(2) as ex:  # two cores: pytest on one, the notebooks on the other and whatever gets free
        jobs  = [ex.submit(pytests)] + [ex.submit(notebook, p) for p in libs] + [ex.submit(smoke, p) for p in runs]
        done  = [j.result() for j in jobs]
    ok,bad,skip = done[0]
    skip += left  # too long for every change, see smoke.txt
    rcs = done[1:]
    ok,bad = ok+sum(r==0 for r in rcs),bad+sum(r!=0 for r in rcs)
    if 'CMTRAG_DATA' not in os.environ: print('CMTRAG_DATA is not set: checks on real rows were skipped')
    print(f'{ok} passed, {bad} failed, {skip} skipped')
    return bad>0

if __name__=='__main__': sys.exit(main())
